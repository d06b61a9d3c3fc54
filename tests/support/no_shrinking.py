"""A pytest plugin for tests/mutants.py: an example that fails is enough, hypothesis need not look for the smallest."""

from hypothesis import Phase, settings

settings.register_profile("no shrinking", phases=[Phase.explicit, Phase.generate])
settings.load_profile("no shrinking")
