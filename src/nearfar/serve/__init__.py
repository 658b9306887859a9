"""Search by photograph: answers from an index, as a page or over HTTP (`nearfar.serve.app`, with the extra `serve`)."""

from nearfar.serve.answers import Answer, Searcher
from nearfar.serve.gallery import Found, write_gallery
from nearfar.serve.pictures import RefusedError, Thumbnails, decode

__all__ = ["Answer", "Found", "RefusedError", "Searcher", "Thumbnails", "decode", "write_gallery"]
