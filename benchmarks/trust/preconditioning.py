"""Would preconditioning y and v on the server help? Condition numbers before and after.

    python benchmarks/trust/preconditioning.py

The lower Hessian is known exactly here, so the answer needs no runs: heavy ball takes sqrt(kappa)
iterations. Writes results/preconditioning.json.
"""

import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "results" / "preconditioning.json"
EXCHANGES = (15, 30, 100)  # Lanczos vectors


def hessian(kappa: float, dim: int, scaled: bool, seed: int = 0) -> np.ndarray:
    """Return a matrix of this condition number: in a random basis, or by badly scaled variables."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    if not scaled:
        return (basis * np.geomspace(1 / kappa, 1, dim)) @ basis.T
    sizes = np.geomspace(1 / np.sqrt(kappa), 1, dim)
    return sizes[:, None] * ((basis * np.linspace(0.5, 1, dim)) @ basis.T) * sizes


def lanczos(matrix: np.ndarray, vectors: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an orthonormal Krylov basis and the matrix within it."""
    rng = np.random.default_rng(1)
    basis = [rng.normal(size=len(matrix))]
    basis[0] /= np.linalg.norm(basis[0])
    for _ in range(min(vectors, len(matrix)) - 1):
        rest = matrix @ basis[-1]
        for _ in range(2):
            stack = np.stack(basis)
            rest = rest - stack.T @ (stack @ rest)
        if np.linalg.norm(rest) < 1e-12:
            break
        basis.append(rest / np.linalg.norm(rest))
    found = np.stack(basis).T
    return found, found.T @ matrix @ found


def condition(matrix: np.ndarray, inverse: np.ndarray) -> float:
    """Return the condition number of a preconditioned matrix."""
    half = np.linalg.cholesky(inverse)
    values = np.linalg.eigvalsh(half.T @ matrix @ half)
    return float(values[-1] / max(values[0], 1e-300))


def deflated(matrix: np.ndarray, vectors: int) -> float:
    """Return the condition number with the inverse in the Krylov space, the best scale outside."""
    basis, inner = lanczos(matrix, vectors)
    inside = basis @ np.linalg.inv(inner) @ basis.T
    outside = np.eye(len(matrix)) - basis @ basis.T
    values = np.linalg.eigvalsh(matrix)
    scales = np.geomspace(values[0], values[-1], 25)
    return min(condition(matrix, inside + outside / scale) for scale in scales)


def main() -> None:
    """Print and write the table."""
    lines = []
    for dim in (20, 100, 400):
        for scaled in (False, True):
            for kappa in (10.0, 100.0, 1e4, 1e6):
                matrix = hessian(kappa, dim, scaled)
                values = np.linalg.eigvalsh(matrix)
                line = {"dim": dim, "badly scaled": scaled, "kappa": float(values[-1] / values[0])}
                line["diagonal"] = condition(matrix, np.diag(1 / np.diag(matrix)))
                line |= {f"{k} vectors": deflated(matrix, k) for k in EXCHANGES}
                lines.append(line)
                print(
                    {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in line.items()}
                )
    FILE.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
