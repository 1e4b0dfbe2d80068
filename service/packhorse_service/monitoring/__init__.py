"""What an operator sees of a running server: its status, as a page, as metrics, in a terminal.

Once a second the server's loop has a ``StatusCollector`` (``collect``) describe it as a ``ServerStatus``
(``status``), a value that never changes. All that is shown is made from that value, by another thread
(``status_http``) or another process (``packhorse status``): whoever looks costs the loop nothing.
"""
