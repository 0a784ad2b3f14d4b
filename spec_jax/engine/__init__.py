"""Text in, text out: the decoder, its sessions and streams, the queue."""
