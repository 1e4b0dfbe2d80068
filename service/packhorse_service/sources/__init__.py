"""From a shard on disk to what its samples hold. Read in the order of the path:

1. ``shards``     patterns → ``Shard``s, and a shard → a stream of bytes
2. ``tar``        a stream, from an offset → ``Sample``s: a key, and members by extension
3. ``formats``    a sample → text, a ``Conversation`` (``messages``) or ``TokenArrays`` (``npy``)
                  (``sample``: a member's content, and ``BadSample``, the error of content that cannot be used)
4. ``rendering``  a conversation → text and the spans of it that are trained on

``packhorse_service.loading.decode`` runs the path for one block and adds the tokenizer. Where all samples of a
block have the same members and hold ids, as nearly always in pre-tokenised shards, it takes a shorter one:
``tar.columnar`` (a block → columns of members), ``formats.decode_columnar``, ``npy.join_arrays``.

A new format of samples is a member of ``SampleFormat`` and a row of ``DECODERS`` in ``formats``: the extensions that
tell it, and a function from ``Sample`` to text, ``Conversation`` or ``TokenArrays`` that raises ``BadSample``. The
documentation is generated from there, and the tests go through all members.
"""

from packhorse_service.sources.formats import SampleFormat
from packhorse_service.sources.rendering import CHATML, ChatTemplate
from packhorse_service.sources.shards import expand_shards, open_shard

__all__ = ["CHATML", "ChatTemplate", "SampleFormat", "expand_shards", "open_shard"]
