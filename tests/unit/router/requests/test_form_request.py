"""Forms: the model is found beside the file, and nothing in a form is a defect."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import RequestInvalid
from router.requests.api_call import ApiCall, OpaquePrompt
from router.requests.endpoints import ENDPOINTS, parse

FORM = "multipart/form-data; boundary=XX"


def call(body: bytes, content_type: str = FORM) -> ApiCall:
    """Parse a form."""
    endpoint = ENDPOINTS["/v1/audio/transcriptions"]
    return parse(endpoint, body, {"Content-Type": content_type}, request_id="r")


def form(*parts: bytes) -> bytes:
    """A form of these parts."""
    return b"".join(b"--XX\r\n" + part + b"\r\n" for part in parts) + b"--XX--\r\n"


FILE = (
    b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00--X\r\n--Y\xff' * 9
)
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\nm'


@pytest.mark.parametrize(
    ("body", "content_type", "model"),
    [
        (form(FILE, MODEL), FORM, "m"),
        (form(MODEL, FILE), 'Multipart/Form-Data; charset=UTF-8; boundary="XX"; ', "m"),
        (b"preamble\r\n" + form(MODEL), FORM, "m"),
        (form(FILE), FORM, ""),
    ],
)
def test_forms(body: bytes, content_type: str, model: str) -> None:
    """The model stands in a field of its own; the file is not looked into."""
    made = call(body, content_type)
    assert (made.model, made.body, made.stream) == (model, body, False)
    assert made.prompt == OpaquePrompt(pieces=(), media_count=1)


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (form(b"no head"), FORM, "not complete"),
        (form(MODEL)[:-9], FORM, "not complete"),
        (b"", FORM, "not complete"),
        (form(*[MODEL] * 65), FORM, "more than 64 parts"),
        (form(MODEL[:-1] + b"\xff"), FORM, "UTF-8"),
        (form(MODEL), "application/json", "multipart/form-data"),
        (form(MODEL), "multipart/form-data", "boundary"),
    ],
)
def test_what_is_no_form(body: bytes, content_type: str, words: str) -> None:
    """The message says what to send."""
    with pytest.raises(RequestInvalid, match=words):
        call(body, content_type)


NAMED = b"Content-Disposition: form-data; "
OTHER = NAMED + b"name=model\r\n\r\nother"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form(MODEL, OTHER), FORM),
        (form(MODEL, NAMED + b'NAME="model"\r\n\r\nother'), FORM),
        (form(MODEL, b'Content-Disposition:form-data;name="model"\r\n\r\nother'), FORM),
        (form(MODEL, b'X-A: ; name="x"\r\n' + OTHER), FORM),
        (form(MODEL, NAMED + b'x="; name=y"; name="model"\r\n\r\nother'), FORM),
        (form(MODEL, NAMED + b'filename="a\\"b"; name="model"\r\n\r\nother'), FORM),
    ],
)
def test_the_model_is_the_one_that_the_engine_reads(body: bytes, content_type: str) -> None:
    """The last one, however it is written: a key may be for the first one only."""
    assert call(body, content_type).model == "other"


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (form(OTHER, FILE + b"\r\n--XXY\r\n" + MODEL), FORM, "boundary stands within"),
        (form(MODEL), 'multipart/form-data; x="boundary=YY', "with a boundary"),
        (form(MODEL), "multipart/form-data; boundary=XX; boundary=YY", "with a boundary"),
        (form(MODEL), "multipart/form-data; charset=utf-7; boundary=XX", "charset"),
        (form(MODEL, b'X-A: ; name="model"\r\n\r\nother'), FORM, "no clear name"),
        (form(MODEL, NAMED + b'\r\n name="model"\r\n\r\nother'), FORM, "no clear name"),
        (form(MODEL, NAMED + b'name="a"; name="model"\r\n\r\nother'), FORM, "no clear name"),
        (form(MODEL, NAMED + b'name="mod\\el"\r\n\r\nother'), FORM, "no clear name"),
        (form(MODEL, NAMED + b"name*=utf-8''model\r\n\r\nother"), FORM, "no clear name"),
    ],
)
def test_a_form_of_two_meanings_is_refused(body: bytes, content_type: str, words: str) -> None:
    """The engine might read another model than the one the key was checked for."""
    with pytest.raises(RequestInvalid, match=words):
        call(body, content_type)


def test_a_boundary_is_not_looked_for_in_other_parameters() -> None:
    """The engine takes the parameter of that name."""
    assert call(form(MODEL), 'multipart/form-data; x="boundary=YY"; boundary=XX').model == "m"


def test_a_stream_is_asked_for_in_a_form() -> None:
    """As a field like the model."""
    stream = b'Content-Disposition: form-data; name="stream"\r\n\r\ntrue'
    made = call(form(MODEL, stream))
    assert made.stream


@settings(max_examples=40)
@given(body=st.binary(max_size=200), at=st.integers(0, 60))
def test_no_form_is_a_defect(body: bytes, at: int) -> None:
    """Neither is anything that stands in a form."""
    whole = form(MODEL, FILE)
    broken = whole[:at] + body + whole[at:]
    for one in (body, broken):
        with contextlib.suppress(RequestInvalid):
            assert call(one).body == one
