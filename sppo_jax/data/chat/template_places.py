"""The chat template of a folder, from every place that transformers reads, and the variables that it may read.

Files come before tokenizer_config.json: `chat_template.jinja`, and `additional_chat_templates/NAME.jinja`. Of several
templates the one named default is used, and tool_use for conversations with tools.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sppo_jax.config.data import BYTES, DataConfig
from sppo_jax.data.chat.roles import Chat, Rendered
from sppo_jax.data.chat.template import ChatTemplate
from sppo_jax.data.tokens.tokenizer_places import read_special_tokens
from sppo_jax.files.paths import file_error, local_path
from sppo_jax.models.hf.tokenizer import (
    DEFAULT,
    FOR_TOOLS,
    MORE_TEMPLATES,
    PROCESSOR_TEMPLATE,
    SETTINGS,
    TEMPLATE,
    read_object,
)


@dataclass(frozen=True, kw_only=True)
class TemplateText:
    """A chat template as text.

    Args:
        text: the template.
        name: its place, for messages.
        for_tools: the template of conversations with tools; None: they have the same.
        variables: special tokens and further variables that the template may read.
        settings: of these, what tokenizer_config.json and data.chat.values say.
    """

    text: str
    name: str
    for_tools: str | None
    variables: dict[str, Any]
    settings: dict[str, Any]


class Templates:
    """The template of each conversation."""

    def __init__(self, found: TemplateText, config: DataConfig) -> None:
        """Makes the templates ready.

        Args:
            found: the templates as text.
            config: gives the date and the turns to learn.

        Raises:
            ValueError: a template is not in the language of jinja2.
        """
        chat, self.name = config.chat, found.name

        def ready(text: str, name: str) -> ChatTemplate:
            return ChatTemplate(text, name=name, variables=found.variables, date=chat.date, train_on=chat.train_on)

        self.default = ready(found.text, found.name)
        self.for_tools = None if found.for_tools is None else ready(found.for_tools, f"{found.name} ({FOR_TOOLS})")

    @property
    def whose_marks(self) -> str:
        return self.default.whose_marks

    def of(self, chat: Chat) -> ChatTemplate:
        """Returns the template of a conversation."""
        return self.for_tools if chat.tools and self.for_tools else self.default

    def render(self, chat: Chat) -> Rendered:
        """Renders a conversation; see `ChatTemplate`."""
        return self.of(chat).render(chat)


def read_template(config: DataConfig) -> TemplateText:
    """Finds the template of a config's conversations.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    folder = local_path(config.tokenizer, "data.tokenizer") if config.tokenizer not in (None, BYTES) else None
    folder = folder.parent if folder and not folder.is_dir() else folder
    found = read_object(folder / SETTINGS) if folder else {}
    settings = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()
                if name.endswith("_token")}  # fmt: skip
    settings = {name: value for name, value in settings.items() if isinstance(value, str)}
    named = read_special_tokens(folder).texts if folder else {}
    if config.chat.template != "auto":
        path, for_tools = local_path(config.chat.template, "data.chat.template"), None
        name, text = str(path), _read(path)
    else:
        name, text, for_tools = _of_folder(folder, found)
    values = config.chat.values
    return TemplateText(text=text, name=name, for_tools=for_tools, variables=named | values, settings=settings | values)


def _of_folder(folder: Path | None, settings: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Returns the place and the text of a folder's template, and that for tools, in the order of transformers."""
    in_settings = {name: (f"{folder}/{SETTINGS}", text) for name, text in _in_settings(settings).items()}
    in_files = _in_files(folder) if folder else {}
    found = in_files or in_settings
    if DEFAULT not in found and DEFAULT in in_settings:
        warnings.warn(
            f"{folder} must have {TEMPLATE} beside {MORE_TEMPLATES}, where transformers finds no default template, got "
            f"a template in {SETTINGS} alone, which is used here; save it as {TEMPLATE}",
            stacklevel=4,
        )
        found = in_settings
    if DEFAULT not in found:
        more = f" with a processor's {PROCESSOR_TEMPLATE}" if folder and (folder / PROCESSOR_TEMPLATE).is_file() else ""
        raise ValueError(
            f"data.chat.template must be a path where the tokenizer has no chat template, got auto and {folder}{more}; "
            "name a file"
        )
    if folder:
        _tell_of_others(folder, *found[DEFAULT], in_settings)
    name, text = found[DEFAULT]
    return name, text, found[FOR_TOOLS][1] if FOR_TOOLS in found else None


def _in_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates of tokenizer_config.json, which has one, a list, or an object."""
    found = settings.get("chat_template")
    if isinstance(found, str):
        return {DEFAULT: found}
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    found = found if isinstance(found, dict) else {}
    return {str(name): text for name, text in found.items() if isinstance(text, str)}


def _in_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the place and the text of each template that is a file."""
    paths = {DEFAULT: folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    paths |= {path.name.removesuffix(".jinja"): path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    return {name: (str(path), _read(path)) for name, path in paths.items()}


def _tell_of_others(folder: Path, name: str, text: str, in_settings: Mapping[str, tuple[str, str]]) -> None:
    """Warns of a default template of the folder that is another and is not read."""
    others = dict([in_settings[DEFAULT]]) if DEFAULT in in_settings else {}
    if (folder / TEMPLATE).is_file():
        others[str(folder / TEMPLATE)] = _read(folder / TEMPLATE)
    if (folder / PROCESSOR_TEMPLATE).is_file():
        of_processor = read_object(folder / PROCESSOR_TEMPLATE).get("chat_template")
        others |= {str(folder / PROCESSOR_TEMPLATE): of_processor} if isinstance(of_processor, str) else {}
    unread = [place for place, other in others.items() if other.rstrip("\n") != text.rstrip("\n")]
    if unread:
        warnings.warn(
            f"a folder must have one chat template, got {name}, which is read, as in transformers, and another in "
            f"{' and '.join(unread)}; delete what is old, or name a file with data.chat.template",
            stacklevel=5,
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise file_error("data.chat.template must be readable", path, error, "choose another file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"data.chat.template must be UTF-8, got {path}; choose another file") from error
