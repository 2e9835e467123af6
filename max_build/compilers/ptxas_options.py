"""Which options of ptxas a unit may set: those that are known to touch no file."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["doubt", "wrong"]

# By `ptxas --help` of 12.9 and 13.3. It has more than it tells, some of which read files: what is
# not named here is refused.
_KNOWN: Final = frozenset(
    """
    Ofast-compile Ofc allow-expensive-optimizations annotate compiler-annotations def-load-cache
    def-store-cache device-debug device-function-maxrregcount device-stack-protector
    disable-optimizer-constants disable-optimizer-consts disable-warnings dlcm
    dont-merge-basicblocks dscm e entry flcm fmad force-load-cache force-store-cache fscm
    func-maxrregcount g g-tensor-memory-access-check g-tmem-access-check generate-line-info
    legacy-bar-warp-wide-behavior lineinfo make-errors-visible-at-exit maxntid maxrregcount
    minnctapersm no-bb-merge O O0 O1 O2 O3 O4 opt-fp-atomics opt-level optimize-float-atomics
    override-directive-values pic position-independent-code regUsageLevel register-usage-level
    ret-end return-at-end sp-bounds-check suppress-async-bulk-multicast-advisory-warning
    suppress-debug-info suppress-double-demote-warning suppress-stack-size-warning v verbose w
    warn-double-usage warn-lmem-usage warn-on-double-precision-use warn-on-local-memory-usage
    warn-on-spills warn-spills Werror warning-as-error
    """.split()
)
_ITEM: Final = re.compile(r"--?([A-Za-z][\w-]*)(=\S*)?")


def wrong(item: str) -> str:
    """Why ptxas must not be given an item, or nothing."""
    item = item.strip()
    found = _ITEM.fullmatch(item)
    if found is None:
        return "ptxas would take it for a file; an option's value follows it after `=`"
    if found[1] not in _KNOWN:
        return "only options of ptxas that touch no files and keep the target are let through"
    return ""


def doubt(text: str) -> str:
    """Why options that are set elsewhere than in the settings cannot be keyed, or nothing."""
    for item in text.split():
        if why := wrong(item):
            return f"ptxas is given `{item}`: {why}"
    return ""
