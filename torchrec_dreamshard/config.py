"""Every knob of training and search, with the paper's values stated beside the defaults.

Each dataclass is frozen and keyword-only; a bad value raises ``ValueError`` that names the field and the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
