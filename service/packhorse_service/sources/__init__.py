"""From a shard on disk to what its samples hold. Read in the order of the path:

1. ``shards``     patterns → ``Shard``s, and a shard → a stream of bytes
2. ``tar``        a stream, from an offset → ``TarMember``s
3. ``samples``    members → ``Sample``s, one for each key
4. ``formats``    a sample → text, a ``Conversation`` (``messages``) or ``TokenArrays`` (``npy``)
5. ``rendering``  a conversation → text and the spans of it that are trained on

``packhorse_service.loading.decode`` runs the path for one block and adds the tokenizer. Where all samples of a
block have the same members and hold ids, as nearly always in pre-tokenised shards, it takes a shorter one:
``plain`` (a stretch → the plain files in it), ``uniform`` (those → columns), ``npy.join_arrays``.
"""

from packhorse_service.sources.formats import SampleFormat
from packhorse_service.sources.rendering import CHATML, ChatTemplate
from packhorse_service.sources.shards import expand_shards, open_shard

__all__ = ["CHATML", "ChatTemplate", "SampleFormat", "expand_shards", "open_shard"]
