"""Made-up text for servers that are asked in words: about as many tokens as a piece has."""

from __future__ import annotations

from collections.abc import Sequence

from engine.lab.arrivals import Piece, tokens_of

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point home "
    "water room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city name president team minute "
    "idea body information back parent face others level office door health person art war history party "
    "result change morning reason research girl guy moment air teacher force education food boy age policy "
    "music market sense nation plan college interest death experience effect use class control field "
    "development role effort rate heart drug show leader light voice wife police mind price report decision "
    "son view relation town road arm difference value building action season society tax director position "
    "player record paper space ground form event official matter center couple site project base star table "
    "need court oil situation cost industry figure street image phone data picture practice piece land product "
    "doctor wall news test movie north love"
)
WORDS = tuple(_TEXT.split())


def worded(pieces: Sequence[Piece]) -> str:
    """A text of so many common words, always the same; equal beginnings of pieces give equal beginnings of text. Most
    tokenizers have a token for each word."""
    return " ".join(WORDS[number] for number in tokens_of(pieces, len(WORDS)))
