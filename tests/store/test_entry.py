from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from max_build.key import canonical, digest
from max_build.record import encode
from max_build.store import actionresult
from max_build.store.amounts import parse_age, parse_size, show_size
from max_build.store.entry import seal, seal_recipes, unseal, unseal_recipes
from max_build.testing.store import example


@given(st.text(), st.dictionaries(st.text(), st.text()))
def test_what_was_sealed_is_unsealed(text, signatures):
    payload = canonical({"text": text})
    found = unseal(seal(payload, signatures))
    assert (found.payload, found.signatures) == (payload, signatures)


@given(st.binary(max_size=200))
def test_no_other_bytes_are_an_entry(data):
    with pytest.raises(ValueError, match="entry"):
        unseal(data)


def test_every_cut_of_an_entry_is_seen():
    data = seal(encode(example("u", b"x")))
    for end in range(len(data)):
        with pytest.raises(ValueError, match="entry"):
            unseal(data[:end])


def test_recipes_belong_to_their_lookup_key():
    payload = seal_recipes("a" * 64, (b"1", "ü".encode()))
    assert unseal_recipes("a" * 64, payload) == (b"1", "ü".encode())
    with pytest.raises(ValueError, match="belong to"):
        unseal_recipes("b" * 64, payload)
    with pytest.raises(ValueError, match="not readable"):
        unseal_recipes("a" * 64, encode(example("u", b"x")))


def test_an_action_result_is_what_protobuf_makes_of_it():
    # Checked once against the messages of `build.bazel.remote.execution.v2`, as google.protobuf
    # writes them: see `test_an_action_result_is_read_by_protobuf`.
    entry = seal(encode(example("u", b"x" * 300)))
    data = actionresult.encode(entry)
    name = digest(b"x" * 300).encode()
    inner = b"\x0a\x40" + name + b"\x10\xac\x02"
    file = b"\x0a\x05" + b"0.mef" + b"\x12" + bytes([len(inner)]) + inner
    assert data.startswith(b"\x12" + bytes([len(file)]) + file + b"\x2a")
    assert actionresult.decode(data) == entry


def test_an_action_result_is_read_by_protobuf():
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto3")

    def message(name, **fields):
        made = file.message_type.add(name=name)
        for field, (number, kind, repeated, of) in fields.items():
            made.field.add(
                name=field,
                number=number,
                type=kind,
                label=3 if repeated else 1,
                type_name=f".t.{of}" if of else None,
            )

    message("Digest", hash=(1, 9, False, ""), size_bytes=(2, 3, False, ""))
    message("OutputFile", path=(1, 9, False, ""), digest=(2, 11, False, "Digest"))
    message(
        "ActionResult",
        output_files=(2, 11, True, "OutputFile"),
        exit_code=(4, 5, False, ""),
        stdout_raw=(5, 12, False, ""),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    result = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.ActionResult"))
    record = example("u", b"one", b"two" * 1000, b"")
    entry = seal(encode(record))
    read = result.FromString(actionresult.encode(entry))
    assert read.stdout_raw == entry
    found = [(f.path, f.digest.hash, f.digest.size_bytes) for f in read.output_files]
    assert found == [(f"{n}.mef", b.digest, b.size) for n, b in enumerate(record.blobs)]
    assert read.SerializeToString(deterministic=True) == actionresult.encode(entry)
    read.exit_code = 3  # as a server that fills in what it knows
    assert actionresult.decode(read.SerializeToString()) == entry


@given(st.binary(max_size=100))
def test_no_other_bytes_are_an_action_result_with_an_entry(data):
    try:
        actionresult.decode(data)
    except ValueError:
        return


@pytest.mark.parametrize(
    ("text", "count"), [("500", 500), ("20GB", 20 * 10**9), ("1.5 GiB", 3 << 29), ("2k", 2000)]
)
def test_sizes(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "5 parsecs", "1..2G", "1iB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="a size is"):
        parse_size(text)


def test_ages():
    assert (parse_age("90s"), parse_age("1.5h"), parse_age("30d")) == (90, 5400, 30 * 86400)
    with pytest.raises(ValueError, match="an age is"):
        parse_age("soon")


def test_shown_sizes():
    assert [show_size(n) for n in (0, 999, 4_500_000, 2e13)] == [
        "0 B",
        "999 B",
        "4.5 MB",
        "20.0 TB",
    ]
