"""The old name of `drystone.run.train`: `python -m drystone.run.runtime plan.json` still works.

Plan files, manifests and scripts of users name it. Whatever is imported under this name is found
in the folder of `drystone.run.train`.
"""

from drystone.run import train

__path__ = train.__path__
