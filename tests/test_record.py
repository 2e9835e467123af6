from __future__ import annotations

import hashlib

import msgspec
import pytest

from max_build.key import Components, key_of
from max_build.record import Blob, Record, Tensor, decode, encode

COMPONENTS = Components(compiler={"c": "1"}, target="cpu", sources={"ir": "aa"})
KEY = key_of(COMPONENTS)
RECORD = Record(
    key=KEY,
    unit="encoder",
    components=COMPONENTS,
    blobs=(Blob(role="mef", digest="b" * 64, size=1),),
)


def test_a_record_survives_the_trip() -> None:
    assert decode(encode(RECORD), KEY) == RECORD


def test_a_blob_is_named_by_its_bytes() -> None:
    assert Blob.of("ir", b"text") == Blob(
        role="ir", digest=hashlib.sha256(b"text").hexdigest(), size=4
    )


def test_a_record_under_another_key_is_refused() -> None:
    other = msgspec.structs.replace(RECORD, key="0" * 64)
    with pytest.raises(ValueError, match="belongs to key"):
        decode(encode(other), "0" * 64)
    with pytest.raises(ValueError, match="belongs to key"):
        decode(encode(RECORD), "0" * 64)


def test_altered_components_are_refused() -> None:
    altered = encode(RECORD).replace(b'"target":"cpu"', b'"target":"sm_90"')
    with pytest.raises(ValueError, match="belongs to key"):
        decode(altered, KEY)


def test_every_truncation_is_refused() -> None:
    data = encode(RECORD)
    for end in range(len(data)):
        with pytest.raises(ValueError, match="not readable"):
            decode(data[:end], KEY)


def test_a_later_schema_is_refused() -> None:
    later = encode(msgspec.structs.replace(RECORD, schema=99))
    with pytest.raises(ValueError, match="schema 99"):
        decode(later, KEY)


def test_a_record_without_a_blob_is_refused() -> None:
    empty = encode(msgspec.structs.replace(RECORD, blobs=()))
    with pytest.raises(ValueError, match="no blob"):
        decode(empty, KEY)


def test_unknown_fields_of_a_later_writer_are_ignored_but_not_in_components() -> None:
    data = encode(RECORD)
    assert decode(data[:-1] + b',"later":1}', KEY) == RECORD
    inside = data.replace(b'"host":""', b'"host":"","later":"1"')
    with pytest.raises(ValueError, match="not readable"):
        decode(inside, KEY)


def test_blob_by_role() -> None:
    assert RECORD.blob("mef") == RECORD.blobs[0]
    assert RECORD.blob("cubin") is None


@pytest.mark.parametrize("device", ["gpu", "gpu:", "gpu:-1", "tpu:0", "gpu:0 "])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    placed = Tensor(name="x", dtype="float32", shape=(), device=device)
    data = encode(msgspec.structs.replace(RECORD, inputs=(placed,)))
    with pytest.raises(ValueError, match="not readable"):
        decode(data, KEY)
