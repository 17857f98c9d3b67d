import pytest

from attngap.ops import processor


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 173\n", "GenuineIntel"),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", "AuthenticAMD"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", ""),
    ],
)
def test_linux_says_who_made_it(content, name, monkeypatch):
    monkeypatch.setattr(processor.Path, "read_text", lambda *args, **options: content)
    assert processor.maker.__wrapped__() == name


@pytest.mark.parametrize(("said", "name"), [("Intel64 Family 6, GenuineIntel", "GenuineIntel"), ("arm", ""), ("", "")])
def test_elsewhere_python_may_know(said, name, monkeypatch):
    def missing(*args, **options):
        raise FileNotFoundError

    monkeypatch.setattr(processor.Path, "read_text", missing)
    monkeypatch.setattr(processor.platform, "processor", lambda: said)
    assert processor.maker.__wrapped__() == name
