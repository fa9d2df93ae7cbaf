"""The one tolerance rule of the project: RMS(error) / RMS(reference), both sides free of NaN."""

from __future__ import annotations

from torch import Tensor


def rms_ratio(reference: Tensor, actual: Tensor) -> float:
    """RMS(actual - reference) / RMS(reference) in fp64; NaN and infinity never pass."""
    assert reference.shape == actual.shape, f"{tuple(reference.shape)} != {tuple(actual.shape)}"
    reference, actual = reference.double(), actual.double()
    assert reference.isfinite().all(), "the reference is not finite"
    assert actual.isfinite().all(), "the result is not finite"
    return float((actual - reference).pow(2).mean().sqrt() / reference.pow(2).mean().sqrt())


def assert_close(name: str, reference: Tensor, actual: Tensor, ratio: float) -> None:
    """Fail with the measured figure unless the RMS ratio is at most ``ratio``."""
    measured = rms_ratio(reference, actual)
    print(f"{name}: rms ratio {measured:.2e} (at most {ratio:.0e})")
    assert measured <= ratio, f"{name}: rms ratio {measured:.3e} > {ratio:.0e}"


def assert_far(name: str, reference: Tensor, actual: Tensor, ratio: float) -> None:
    """The twin of `assert_close`: a deliberate mistake must be seen, at 100 times the tolerance."""
    measured = rms_ratio(reference, actual)
    print(f"{name}: rms ratio {measured:.2e} (must exceed {100 * ratio:.0e})")
    assert measured > 100 * ratio, f"{name}: a wrong result passes, rms ratio {measured:.3e}"
