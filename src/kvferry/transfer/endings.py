"""How the transfers of one rank ended, for whoever asks afterwards. The core's thread only."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.ids import TransferId

_MOST = 10_000


class Endings(OrderedDict[TransferId, tuple[bool, str, str]]):
    """Transfer id -> (ok, code, reason) of the last ten thousand."""

    def __setitem__(self, transfer_id: TransferId, ending: tuple[bool, str, str]) -> None:
        super().__setitem__(transfer_id, ending)
        while len(self) > _MOST:
            self.popitem(last=False)
