"""Search by photograph: answers from an index, as a page or over HTTP (`nearfar.serve.app`, with the extra `serve`)."""

from nearfar.serve._answers import Answer, Searcher
from nearfar.serve._gallery import Found, write_gallery
from nearfar.serve._pictures import RefusedError, Thumbnails, decode

__all__ = ["Answer", "Found", "RefusedError", "Searcher", "Thumbnails", "decode", "write_gallery"]
