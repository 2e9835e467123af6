from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max_build.key import Components, canonical, changes, digest, key_of

TEXT = st.text(max_size=8)
TABLE = st.dictionaries(TEXT, TEXT, max_size=3)
COMPONENTS = st.builds(
    Components,
    compiler=TABLE,
    target=TEXT,
    host=TEXT,
    options=TABLE,
    sources=TABLE,
    dependencies=TABLE,
    environment=TABLE,
)
SAMPLE = Components(compiler={"max": "26.7.0"}, target="sm_90a", sources={"ir": "00"})


@given(COMPONENTS, COMPONENTS)
def test_keys_are_equal_exactly_when_components_are(one: Components, other: Components) -> None:
    assert (key_of(one) == key_of(other)) == (one == other)


@given(COMPONENTS, COMPONENTS)
def test_changes_are_empty_exactly_when_keys_are_equal(one: Components, other: Components) -> None:
    assert (not changes(one, other)) == (key_of(one) == key_of(other))


@given(COMPONENTS)
def test_the_encoding_can_be_read_back(one: Components) -> None:
    assert msgspec.json.decode(canonical(one), type=Components) == one


def test_the_order_in_which_a_table_was_filled_does_not_matter() -> None:
    one = msgspec.structs.replace(SAMPLE, options={"a": "1", "b": "2"})
    other = msgspec.structs.replace(SAMPLE, options={"b": "2", "a": "1"})
    assert key_of(one) == key_of(other)


def test_a_key_is_the_digest_that_the_format_says() -> None:
    text = (
        b"max-build key 1\n"
        b'{"compiler":{"max":"26.7.0"},"dependencies":{},"environment":{},"host":"","options":{},'
        b'"schema":1,"sources":{"ir":"00"},"target":"sm_90a"}'
    )
    assert key_of(SAMPLE) == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compiler", {"max": "26.7.1"}),
        ("target", "sm_90"),
        ("host", "x86-64-v4"),
        ("options", {"fast": "1"}),
        ("sources", {"ir": "01"}),
        ("dependencies", {"a.h": "00"}),
        ("environment", {"MODULAR_X": "1"}),
        ("schema", 2),
    ],
)
def test_every_component_changes_the_key_and_is_named(field: str, value: object) -> None:
    other = msgspec.structs.replace(SAMPLE, **{field: value})
    assert key_of(other) != key_of(SAMPLE)
    ((name, _, _),) = changes(SAMPLE, other)
    assert name.partition(".")[0] == field


def test_digest_is_plain_sha256() -> None:
    assert digest(b"abc") == hashlib.sha256(b"abc").hexdigest()
