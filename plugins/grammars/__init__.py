"""Compilers of grammars: what masks tokens that structured output may not have."""
