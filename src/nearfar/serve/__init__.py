"""Search by photograph: answers from an index, as a page or over HTTP (`nearfar.serve.app`, with the extra `serve`)."""

from nearfar.serve.answers import Answer, Searcher
from nearfar.serve.decode import RefusedError, decoded
from nearfar.serve.gallery import Found, write_gallery
from nearfar.serve.thumbnails import Thumbnails

__all__ = ["Answer", "Found", "RefusedError", "Searcher", "Thumbnails", "decoded", "write_gallery"]
