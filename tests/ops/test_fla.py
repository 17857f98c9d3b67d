"""The far part of hybrid attention by flash-linear-attention: that it is the far part, and when it is chosen.

No GPU is needed: the kernel is stood in for by its formula, by the package's own naive reference where that is
installed, and by its real kernels in Triton's interpreter where Triton is installed too.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attngap.mechanisms.calls import far_parts_by
from attngap.mechanisms.variants.hybrid import Hybrid
from attngap.ops import native
from attngap.ops.hybrid import definition, far_form, fla, hybrid_attention
from tests.pretended import Elsewhere, SecondDevice, elsewhere, here

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = ("q", "k", "v", "fq", "fk", "log_gain")


def formula(q, k, v, *, scale, initial_state, output_final_state, normalize):
    """What `chunk_linear_attn` documents: tensors are (b, t, h, width), the state (b, h, r, dv)."""
    assert output_final_state
    assert not normalize
    weights = torch.einsum("bihr,bjhr->bhij", q * scale, k).tril()
    rows = torch.einsum("bhij,bjhd->bihd", weights, v) + torch.einsum("bihr,bhrd->bihd", q * scale, initial_state)
    return rows, initial_state + torch.einsum("bjhr,bjhd->bhrd", k, v)


def naive():
    """flash-linear-attention's own reference, loaded by path: importing the package needs Triton."""
    pytest.importorskip("einops", reason="flash-linear-attention's naive files need einops")
    found = importlib.util.find_spec("fla")
    root = os.environ.get("ATTNGAP_FLA") or (found and found.origin and str(Path(found.origin).parents[1]))
    if not root:
        pytest.skip("install flash-linear-attention, or set ATTNGAP_FLA to a checkout of it, to compare with it")
    path = Path(root) / "fla" / "ops" / "linear_attn" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_linear_attn", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def in_single(*given, initial_state, **options):
        rows, state = (x.float() for x in given), initial_state.float()
        return (x.to(given[0]) for x in module.naive_recurrent_linear_attn(*rows, initial_state=state, **options))

    return in_single


@pytest.fixture(params=["formula", "naive"])
def kernel(request, monkeypatch):
    """Hybrid attention goes through flash-linear-attention, whose kernel is stood in for; the tolerance of that."""
    calls, stand_in = [], formula if request.param == "formula" else naive()

    def called(*args, **options):
        calls.append(args)
        return stand_in(*args, **options)

    monkeypatch.setattr(fla, "usable", lambda *_, **__: True)
    monkeypatch.setattr(fla, "_kernel", lambda: called)
    with native.off():
        yield 1e-9 if request.param == "formula" else 2e-4  # theirs is in single precision
    assert calls


def make(b=2, h=4, kv=2, t=37, r=7, dv=5):
    generator = torch.Generator().manual_seed(t + r)

    def draw(heads, *size):
        return torch.randn(b, heads, t, *size, generator=generator, dtype=torch.float64)

    found = 2 * draw(h, 6), draw(kv, 6), draw(kv, dv), draw(h, r).exp(), draw(kv, r).exp(), draw(h)
    return [x.requires_grad_() for x in found]


def attend(inputs, span=slice(None), **options):
    *rest, gain = (x[:, :, span] for x in inputs)
    return hybrid_attention(*rest, log_gain=gain, **options)


def assert_alike(inputs, found, expected, tolerance):
    """In value and in the gradient of every input, relative to its largest entry."""
    above = [torch.randn_like(x) for x in expected]
    grads = (torch.autograd.grad(x, inputs, above) for x in (found, expected))
    pairs = [*zip(found, expected, strict=True), *zip(*grads, strict=True)]
    for label, (x, y) in zip((*(f"result {i}" for i in range(len(found))), *NAMES), pairs, strict=True):
        assert (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=1), label


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("kv", [1, 4])
@pytest.mark.parametrize(
    ("t", "window", "sinks", "r"),
    [(2, 64, 0, 7), (37, 1, 0, 2), (37, 8, 4, 16), (37, 5, 1, 33), (37, 64, 4, 7), (37, 8, 40, 7), (130, 16, 4, 64)],
)
def test_values_and_gradients_equal_the_definition(kernel, t, window, sinks, r, kv, relative):
    inputs = make(t=t, kv=kv, r=r)
    *rest, gain = inputs
    options = {"window": window, "sinks": sinks, "relative": relative}
    expected = definition.hybrid_attention(*rest, log_gain=gain, **options)
    assert_alike(inputs, [attend(inputs, **options)[0]], [expected], kernel)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 4), (9, 0), (9, 4)])
def test_a_padded_batch_in_pieces_equals_the_torch_form_with_its_state(kernel, window, sinks, monkeypatch):
    monkeypatch.setattr(fla, "SPAN", 6)
    inputs = make(b=3)
    mask = torch.ones(3, 37, dtype=torch.bool)
    mask[0, :11] = mask[1, 20:] = False
    results = []
    for chunk in (None, 8):  # a given chunk is for the torch form
        state, parts = None, []
        for span in (slice(0, 3), slice(3, 21), slice(21, 37)):
            options = {"window": window, "sinks": sinks, "mask": mask[:, span], "state": state, "chunk": chunk}
            out, state = attend(inputs, span, **options)
            parts.append(out)
        assert state is not None
        assert state.pop("count").tolist() == [26, 20, 37]
        results.append([torch.cat(parts, 2), *state.values()])
    assert_alike(inputs, *results, kernel)


def test_keys_that_come_early_are_found_out(kernel, monkeypatch):
    """The comparison above sees a window that is one too short."""
    inputs = make()
    expected = attend(inputs, window=8, chunk=8)[0]
    late = fla.late
    monkeypatch.setattr(fla, "late", lambda *given: late(*given).roll(-1, 2))
    assert (attend(inputs, window=8)[0] - expected).abs().max() > 1e-3


def test_half_precision_sums_in_single(kernel):
    inputs = [x.detach().bfloat16() for x in make()]
    seen = fla._kernel()
    with pytest.MonkeyPatch.context() as patch:
        dtypes = []
        patch.setattr(fla, "_kernel", lambda: lambda *x, **options: (dtypes.extend(x), seen(*x, **options))[1])
        out, state = attend(inputs, window=8)
    assert {x.dtype for x in dtypes} == {torch.float32}
    assert (out.dtype, state["S"].dtype) == (torch.bfloat16, torch.float32)
    close = attend(inputs, window=8, chunk=8)[0]
    assert (out.float() - close.float()).abs().max() <= 0.02 * close.float().abs().max()


def test_everything_stays_on_the_device(kernel):
    inputs = [x.detach() for x in make()]
    with SecondDevice():
        out, state = attend([elsewhere(x) for x in inputs], window=8)
    assert all(isinstance(x, Elsewhere) for x in (out, *state.values()))
    assert torch.equal(here(out), attend(inputs, window=8)[0])


@pytest.fixture
def anew():
    """Nothing is remembered of what was found out about the package."""
    kept = fla._kernel, fla._agrees, fla._refuse
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


@pytest.fixture
def present(anew, monkeypatch):
    """As if the package were installed and right on every device."""
    monkeypatch.setattr(fla, "installed", lambda: True)
    monkeypatch.setattr(fla, "_agrees", lambda *_: True)
    versions = importlib.metadata.version
    monkeypatch.setattr(fla.importlib.metadata, "version", lambda name: "0.6.0" if "fla" in name else versions(name))


def test_chosen_on_cuda_alone_and_where_it_fits(present, monkeypatch):
    fits = (CUDA, torch.float32, 8, 64, 64)
    assert fla.usable(*fits)
    assert fla.usable(CUDA, torch.bfloat16, 8, 256, 128, tracked=True)
    assert not fla.usable(CPU, *fits[1:])
    assert not fla.usable(torch.device("mps"), *fits[1:])
    assert not fla.usable(CUDA, torch.float64, 8, 64, 64)
    assert not fla.usable(CUDA, torch.float32, 8, 257, 64)
    assert not fla.usable(CUDA, torch.float32, 8, 64, 257)
    assert not fla.usable(CUDA, torch.float32, 8, 1, 64)  # `window_attention`
    with native.off():
        assert not fla.usable(*fits)
    monkeypatch.setenv("ATTNGAP_NATIVE", "0")
    assert not fla.usable(*fits)


def test_not_installed_means_torch(anew, monkeypatch, capsys):
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: None)
    assert not fla.usable(CUDA, torch.float32, 8, 64, 64)
    assert far_form(CUDA, torch.float32, 8, 64, 64) == "torch"
    assert capsys.readouterr().err == ""


def test_a_receipt_names_what_computes_the_far_part(present):
    hybrid = Hybrid(4, 8, feature_map="prototype")
    assert far_parts_by([hybrid], CUDA) == "flash-linear-attention 0.6.0"
    assert far_parts_by([Hybrid(4, 8, feature_map="none")], CUDA) is None
    assert far_parts_by([hybrid.double()], CUDA) == "torch"
    assert far_form(CPU, torch.bfloat16, 4, 16, 8) == "torch"
    with native.off():
        assert far_form(CPU, torch.float32, 4, 16, 8) == "torch"
    if native.available():
        assert far_form(CPU, torch.float32, 4, 16, 8) == f"compiled (numba {importlib.metadata.version('numba')})"


def test_an_old_or_broken_package_is_told_once_and_left_alone(anew, monkeypatch, capsys):
    monkeypatch.setattr(fla, "installed", lambda: True)
    monkeypatch.delenv(fla.PRECISION, raising=False)
    monkeypatch.setattr(fla.importlib.metadata, "version", lambda _: "0.5.2")
    for _ in range(2):
        assert not fla.usable(CUDA, torch.float32, 8, 64, 64)
    said = "attngap: flash-linear-attention is not used, torch is: version 0.5.2 is too old, 0.6 is needed\n"
    assert capsys.readouterr().err == said
    fla._kernel.cache_clear()
    fla._agrees.cache_clear()
    monkeypatch.setattr(fla.importlib.metadata, "version", lambda _: "0.6.0")
    monkeypatch.setitem(sys.modules, "fla", None)  # an import of it fails
    assert not fla.usable(CUDA, torch.float32, 8, 64, 64)
    assert "torch is: ModuleNotFoundError: " in capsys.readouterr().err
    assert os.environ.pop(fla.PRECISION) == "ieee"


@pytest.mark.parametrize("tracked", [False, True])
def test_used_only_after_it_gave_what_torch_gives(anew, monkeypatch, capsys, tracked):
    monkeypatch.setenv(fla.PRECISION, "ieee")

    def try_out(kernel):
        fla._agrees.cache_clear()
        monkeypatch.setattr(fla, "_kernel", lambda: kernel)
        return fla._agrees(CPU, 2, 8, 5, tracked), capsys.readouterr().err

    def a_little_off(q, k, v, **options):
        return formula(q * 1.001, k, v, **options)

    def broken(*_, **__):
        raise RuntimeError("no such device\nand more")

    assert try_out(formula) == (True, "")
    agrees, said = try_out(a_little_off)
    assert not agrees
    assert "8 features are off by 0.00" in said
    assert "on cpu, allowed is 1e-04" in said
    assert try_out(broken) == (False, "attngap: flash-linear-attention is not used, torch is: "
                               "RuntimeError: no such device\n")  # fmt: skip
    monkeypatch.setenv(fla.PRECISION, "tf32")
    assert try_out(a_little_off) == (True, "")


def test_a_wrong_gradient_alone_is_found_out(anew, monkeypatch, capsys):
    monkeypatch.setenv(fla.PRECISION, "ieee")

    def forgets(q, k, v, *, initial_state, **options):
        return formula(q, k.detach(), v, initial_state=initial_state, **options)

    monkeypatch.setattr(fla, "_kernel", lambda: forgets)
    assert fla._agrees(CPU, 2, 8, 5, False)
    assert not fla._agrees(CPU, 2, 8, 5, True)


@pytest.mark.parametrize(("precision", "largest"), [("ieee", 1e-4), ("tf32", 1e-2)])
def test_its_own_kernels_give_the_definition_in_tritons_interpreter(precision, largest):
    for package in ("fla", "triton", "einops"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'attngap[cuda]' runs its kernels in an interpreter")
    script = Path(__file__).with_name("interpreted_fla.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", fla.PRECISION: precision}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"agrees True, products {precision.upper()}, torch's form off by " in done.stdout
    assert float(done.stdout.split()[-1]) < largest
