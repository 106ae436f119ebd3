"""Text to token ids and back: sentencepiece trained on the corpus, tiktoken's vocabularies, a Hugging Face file, ASCII.

Decoding restores the text (``decode(encode(text)) == text``), with two exceptions: Hugging Face files may compose
characters, and the ASCII tokenizer loses characters beyond ASCII. A text that spells a special token ("<|endoftext|>",
"</s>") becomes ordinary tokens, so that no text can forge the end of a document.
"""

from lightscale.data_pipeline.tokenizers.ascii_characters import AsciiTokenizer
from lightscale.data_pipeline.tokenizers.directory import copy_tokenizer, files_sha256
from lightscale.data_pipeline.tokenizers.fast_path import CheckedTokenizer, fast_path_notes, with_fast_path
from lightscale.data_pipeline.tokenizers.huggingface_file import HuggingFaceTokenizer
from lightscale.data_pipeline.tokenizers.interface import DESCRIPTION_FILE, END_OF_TEXT, Tokenizer
from lightscale.data_pipeline.tokenizers.load import load_tokenizer
from lightscale.data_pipeline.tokenizers.no_text import NoText
from lightscale.data_pipeline.tokenizers.sentencepiece_model import SentencePieceTokenizer, train_sentencepiece
from lightscale.data_pipeline.tokenizers.tiktoken_encoding import TiktokenTokenizer, load_tiktoken

__all__ = [
    "DESCRIPTION_FILE",
    "END_OF_TEXT",
    "AsciiTokenizer",
    "CheckedTokenizer",
    "HuggingFaceTokenizer",
    "NoText",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "copy_tokenizer",
    "fast_path_notes",
    "files_sha256",
    "load_tiktoken",
    "load_tokenizer",
    "train_sentencepiece",
    "with_fast_path",
]
