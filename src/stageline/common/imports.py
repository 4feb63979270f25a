"""Functions named as package.module:function, optional libraries, folders of libraries, and names of the hub."""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from stageline.common.errors import StagelineError, nearest


def library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages, in a virtual environment and outside of it.

    >>> os.__file__.startswith(library_folders())
    True
    """
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    others = {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    return tuple(sorted(path for path in own | others if path))


def find_function(name: str) -> Callable[..., Any]:
    """Import the function with this name; the current directory is also searched for its module.

    >>> find_function("math:sqrt")(4.0)
    2.0
    >>> find_function("math:sqrrt")
    Traceback (most recent call last):
        ...
    stageline.StagelineError: math has no function 'sqrrt' (did you mean 'sqrt'?)
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise StagelineError(f"{name!r} is not a function name; write package.module:function")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise StagelineError(
            f"cannot import {module_name}: {error}; make sure that Python can import it here"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    function = getattr(module, function_name, None)
    if not callable(function):
        near = nearest(function_name, [attribute for attribute in dir(module) if not attribute.startswith("_")])
        raise StagelineError(f"{module_name} has no function {function_name!r}{near}")
    return function  # type: ignore[no-any-return]


def require(library: str, what: str, install: str = "") -> Any:
    """Import an optional library; raise `StagelineError` with the install command if it is missing.

    >>> require("math", "the square root").sqrt(4.0)
    2.0
    >>> require("no_such_library", "the launcher x", "'stageline[x]'")
    Traceback (most recent call last):
        ...
    stageline.StagelineError: the launcher x needs no_such_library, which cannot be imported (No module named
    'no_such_library'); run pip install 'stageline[x]'
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise StagelineError(
            f"{what} needs {library}, which cannot be imported ({error}); run pip install {install or library}"
        ) from error


def is_hub_name(name: str) -> bool:
    """Whether a name has the form of a model of the Hugging Face hub, and no such path exists.

    >>> is_hub_name("meta-llama/Llama-3.2-1B"), is_hub_name("gpt"), is_hub_name("./model"), is_hub_name("a/b.json")
    (True, False, False, False)
    """
    has_form = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None
    return has_form and not name.endswith((".json", ".toml", ".safetensors")) and not os.path.exists(name)
