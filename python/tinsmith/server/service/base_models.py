"""The base models of a server, by the names that clients use."""

from dataclasses import replace

from tinsmith.models.registry import BaseModel, find_model
from tinsmith.system.home import spelled, split_context


class BaseModels(dict[str, BaseModel]):
    """The models by their registered names."""

    def name(self, given: str) -> str:
        """The registered name of a base model: the given name in any case, or its path, without a
        suffix for the context."""
        name, _ = split_context(given)
        for asked in (given, name):
            if (known := spelled(asked, self)) is not None:
                return known
        paths = {known: model.path for known, model in self.items()}
        try:
            path = find_model(name, paths, make=False).resolve()
        except (OSError, ValueError):
            path = None
        for known, model in self.items():
            if model.path.resolve() == path:
                return known
        raise ValueError(f"unknown base model {given!r:.200}; this server has {sorted(self)}")

    def model(self, name: str) -> BaseModel:
        """The base model of a name, with the context in the name: "NAME:peft:32768"."""
        model = self[self.name(name)]
        _, context = (name, None) if name in self else split_context(name)
        if context is None:
            return model
        if not 1 <= context <= model.context:
            raise ValueError(
                f"{name!r:.200} asks for a context of {context} tokens; the model's is "
                f"{model.context}"
            )
        return replace(model, context=context)
