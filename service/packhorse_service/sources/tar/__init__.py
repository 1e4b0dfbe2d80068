"""Tar shards, and webdataset's rules for what lies in them. Nothing here knows what a sample's content means.

``reader``    a stream, from any offset on → ``TarMember``s, one by one: every kind of tar there is
``grouping``  members → ``Sample``s: those that follow one another and share a key
``scan``      a buffer → the plain files at its front, all at once
``columnar``  those → ``ColumnarSamples``, where all samples of a block have the same members
"""
