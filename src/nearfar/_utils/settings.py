"""`Settings`: a module whose constructor arguments are attributes that may be read and set at any time.

A class names its arguments once, as annotations with defaults, as a dataclass does:

    class NTXent(Recipe):
        temperature: Positive = 0.07
        reduction: Reduction = "mean"

These define the constructor and its signature, `repr`, and the checks: a value that its annotation does not allow
raises the same error in the constructor and when the attribute is set, which then keeps its value. A class computes
whatever depends on its settings in `_remake`, which runs after each change.

A subclass with its own `__init__` is constructed like any other class; its annotations are not settings.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from torch import Tensor, nn

from nearfar._utils.checks import check_choice, check_number, check_positive, check_whole
from nearfar._utils.keywords import Keywords, right_name

Check = Callable[[str, str, object], None]
MISSING: Any = inspect.Parameter.empty  # marks a required argument, which has no default

Number = Annotated[float | Tensor, functools.partial(check_number, learned=True)]
"""A number, which may be learned: a 0-dim `nn.Parameter`."""
Positive = Annotated[float | Tensor, functools.partial(check_positive, learned=True)]
"""A number above zero, which may be learned."""
ZeroOrMore = Annotated[float | Tensor, functools.partial(check_positive, zero=True, learned=True)]
"""A number, zero or above, which may be learned."""
Whole = Annotated[int, check_whole]  # a whole number above zero


def _check_of(hint: Any) -> Check | None:
    """The check for an annotation; None if it allows anything or is checked elsewhere."""
    if get_origin(hint) is Annotated:
        return next((x for x in get_args(hint)[1:] if callable(x)), None)
    if get_origin(hint) is Literal:
        return lambda owner, name, value: check_choice(owner, name, value, get_args(hint))
    if len(get_args(hint)) == 2 and get_args(hint)[1] is type(None):
        inner = _check_of(get_args(hint)[0])
        return inner and (lambda owner, name, value: None if value is None else inner(owner, name, value))
    plain: dict[Any, Check] = {float: check_number, bool: _check_bool}
    return plain.get(hint) if hint in (float, bool) else None


def _check_bool(owner: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be True or False, but came as {value!r}.")


def _parameters(kind: type[Settings]) -> dict[str, inspect.Parameter]:
    """The settings that the annotations of a class declare, as parameters of its constructor."""
    placed, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    found, here = dict[str, inspect.Parameter](), named if kind.keyword_only else placed
    try:
        hints = inspect.get_annotations(kind, eval_str=True)
    except NameError:  # for a class defined in a function
        hints = inspect.get_annotations(kind)
    for name, hint in hints.items():
        if name == "_":  # the settings after KW_ONLY
            here = named
        elif not (name.startswith("_") or str(hint).removeprefix("typing.").startswith("ClassVar")):
            default = vars(kind).get(name, MISSING)
            by_place = isinstance(default, Field)  # kw_only=False, the only option of `field` that is supported
            found[name] = inspect.Parameter(
                name, placed if by_place else here, default=MISSING if by_place else default, annotation=hint
            )
    return found


class Settings(Keywords, nn.Module):
    """Base class of modules whose constructor arguments are settings; see the docstring of this module."""

    settings: ClassVar[Mapping[str, inspect.Parameter]] = {}  # the arguments of the constructor, by name
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Settings that determine the size of a parameter, and so cannot change."""
    either: ClassVar[tuple[tuple[str, ...], ...]] = ()  # groups of alternatives: giving one sets the others to None
    dropped: ClassVar[frozenset[str]] = frozenset()  # settings of a base class that this class does not have
    keyword_only: ClassVar[bool] = False  # arguments are given by name, unless `field(kw_only=False)` says otherwise

    def __init_subclass__(cls, *, without: Iterable[str] = (), **more: Any) -> None:
        """Make the constructor from the settings of the class and its bases, except those named in `without`.

        If a setting is stored elsewhere, such as in a learned parameter, a method `_read_NAME` returns its value.
        """
        super().__init_subclass__(**more)
        init = vars(cls).get("__init__")
        if init is None and hasattr(cls.__init__, "made"):
            own = _parameters(cls)
            for name in own:  # a class attribute would hide a parameter of that name
                if name in vars(cls):
                    delattr(cls, name)
                if hasattr(cls, f"_read_{name}"):
                    setattr(cls, name, property(getattr(cls, f"_read_{name}")))
            inherited = {name: x for name, x in cls.settings.items() if name not in own and name not in without}
            cls.settings = _sort({**own, **inherited})
            cls.dropped = (cls.dropped | frozenset(without)) - own.keys()
            init = _constructor(cls)
        if init is not None:
            cls.__init__ = _end_construction(init)  # type: ignore[method-assign]

    def __init__(self) -> None:
        super().__init__()

    __init__.made = True  # type: ignore[attr-defined]

    def _prepare(self) -> None:
        """Set attributes that are not settings; runs before the settings are stored."""

    def _begin(self) -> None:
        """Create parameters whose size depends on settings; runs before `_remake`."""

    def _remake(self) -> None:
        """Compute, and so validate, what depends on several settings; if it fails, nothing has changed."""

    def _changed(self, name: str) -> None:
        """Called after a setting has changed, to update learned parameters."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a setting is validated first, and what depends on it is computed again."""
        state = self.__dict__
        if value is not None and state.get("_modules", {}).get(name) is value:
            return  # the same module again, as trainers do that walk through all modules
        if name in type(self).settings and "_settled" in state:
            self._set(name, value)
            return
        if "_closed" in state and not name.startswith("_") and not hasattr(self, name):
            known = type(self).settings
            if _is_near(type(self).__name__, name, known):
                raise AttributeError(
                    f"{type(self).__name__}: there is no setting {name}; {right_name(type(self).__name__, name, known)}"
                )
        made = getattr(type(self), name, None)
        derived = name in self.dropped or (isinstance(made, property) and made.fset is None)
        if derived and "_settled" in state:
            words = ", ".join(type(self).settings)
            raise AttributeError(f"{type(self).__name__}: {name} cannot be set; its settings are {words}.")
        super().__setattr__(name, value)

    def _set(self, name: str, value: Any) -> None:
        owner = type(self).__name__
        if name in self.fixed:
            raise AttributeError(
                f"{owner}: {name} cannot change, as what is learned was made for {getattr(self, name)!r}; "
                f"make a new {owner}."
            )
        news = {name: value}
        if value is not None:
            news |= dict.fromkeys(_others(self, name))
        places: list[dict[str, Any]] = [self.__dict__, self._parameters, self._modules]
        before = [{key: place[key] for key in news if key in place} for place in places]
        try:
            for key, new in news.items():
                self._store(key, new)
            self._remake()
        except BaseException:
            for place, old in zip(places, before, strict=True):
                for key in news:
                    place.pop(key, None)
                place.update(old)
            raise
        self._changed(name)

    def _store(self, name: str, value: Any) -> None:
        """Validate a value and store it; parameters and modules are registered under the name of the setting."""
        hint = type(self).settings[name].annotation
        check = _check_of(hint)
        if check is not None:
            check(type(self).__name__, name, value)
        if type(value).__module__ == "numpy" and hasattr(value, "item"):
            value = value.item()  # torch does not accept every NumPy number
        places: list[dict[str, Any]] = [self.__dict__, self._parameters, self._modules]
        for place in places:
            place.pop(name, None)
        if isinstance(value, nn.Parameter):
            self._parameters[name] = value
        elif isinstance(value, nn.Module):
            self._modules[name] = value
        else:
            self.__dict__[name] = value

    def setting(self, name: str) -> Any:
        """The value that was given for a setting; the attribute of that name may return a learned value."""
        places: list[dict[str, Any]] = [self.__dict__, self._parameters, self._modules]
        return next(place[name] for place in places if name in place)

    def __repr__(self) -> str:
        """Every setting under its own name."""
        if not type(self).settings:
            return super().__repr__()
        return f"{type(self).__name__}({', '.join(f'{x}={_show(getattr(self, x))}' for x in type(self).settings)})"


def _sort(settings: dict[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """Order parameters for a signature: positional ones first, and those without a default before the others."""
    placed = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return dict(
        sorted(settings.items(), key=lambda x: (x[1].kind, x[1].kind is placed and x[1].default is not MISSING))
    )


def _constructor(kind: type[Settings]) -> Callable[..., None]:
    mine = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([mine, *kind.settings.values()], return_annotation=None)

    def construct(self: Settings, *args: Any, **given: Any) -> None:
        try:
            bound = signature.bind(self, *args, **given)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}.") from None
        others = {other for name, x in bound.arguments.items() if x is not None for other in _others(self, name)}
        bound.arguments.update(dict.fromkeys(others.difference(bound.arguments)))
        bound.apply_defaults()
        nn.Module.__init__(self)
        self._prepare()
        for name in kind.settings:
            self._store(name, bound.arguments[name])
        self._begin()
        self._remake()
        self.__dict__["_settled"] = True

    construct.__signature__ = signature  # type: ignore[attr-defined]
    construct.__name__, construct.__qualname__ = "__init__", f"{kind.__qualname__}.__init__"
    construct.made = True  # type: ignore[attr-defined]
    return construct


def _end_construction(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `__init__`: once it has run, new attributes are checked for misspelled settings."""

    @functools.wraps(init)
    def construct(self: Settings, *args: Any, **given: Any) -> None:
        init(self, *args, **given)
        if getattr(type(self).__init__, "__wrapped__", None) is init:
            self.__dict__["_closed"] = True

    return construct


def _others(settings: Settings, name: str) -> list[str]:
    """The alternatives of a setting."""
    return [other for group in settings.either if name in group for other in group if other != name]


def _is_near(owner: str, name: str, known: Iterable[str]) -> bool:
    """Whether a name is so close to a setting's name that it is probably a misspelling."""
    said = right_name(owner, name, known)
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return bool(near) or said.startswith("write ")


def _show(value: object) -> str:
    """The `repr` of a value; for a learned one, its number."""
    if not isinstance(value, Tensor):
        return repr(value)
    number = f"{value.detach().item():g}"
    return f"Parameter({number})" if isinstance(value, nn.Parameter) else number
