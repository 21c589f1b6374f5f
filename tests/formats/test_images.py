"""PNG and JPEG files: pixels are Pillow's own, whatever else is in a file changes nothing, and bad
files are refused with a sentence before they are decoded."""

import io
import re
import struct
import sys
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFile, PngImagePlugin
from tinsmith.formats import images

HEIGHT, WIDTH = 37, 53


def picture(channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    """Smooth colours with some noise, (HEIGHT, WIDTH, channels)."""
    rng = np.random.default_rng(seed)
    y, x, c = np.mgrid[:HEIGHT, :WIDTH, :channels]
    waves = 127 + 100 * np.sin(x / 7 + c) * np.cos(y / 5 - c)
    return np.clip(waves + rng.normal(0, 8, waves.shape), 0, 255).astype(np.uint8)


def saved(image: Image.Image, name: str = "png", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, name, **options)
    return out.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    summed = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", summed)


def png(width: int, height: int, bits: int, colours: int, rows: bytes, *more: bytes) -> bytes:
    """A PNG file of filtered rows, with more chunks in front of them."""
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *more, chunk(b"IDAT", zlib.compress(rows))]
    return b"".join([images.SIGNATURE, *parts, chunk(b"IEND", b"")])


def pixels(data: bytes, name: str = "png", to: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    size = images.read_size(data, name)
    found = images.decode(data, name, to or size)
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    return found


@pytest.fixture(scope="module")
def rgb() -> Image.Image:
    return Image.fromarray(picture())


@pytest.mark.parametrize("to", [(HEIGHT, WIDTH), (32, 64), (64, 32), (96, 160), (1, 1)])
@pytest.mark.parametrize("name", ["png", "jpeg"])
def test_pixels_are_pillows_resized_with_its_bicubic_filter(rgb, name, to) -> None:
    data = saved(rgb, name)
    wanted = Image.open(io.BytesIO(data)).resize(to[::-1], Image.Resampling.BICUBIC)
    assert images.read_size(data, name) == (HEIGHT, WIDTH)
    np.testing.assert_array_equal(pixels(data, name, to), np.asarray(wanted))
    np.testing.assert_array_equal(pixels(memoryview(data), name, to), np.asarray(wanted))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_each_kind_of_png_without_transparency_is_converted_by_pillow(rgb, mode) -> None:
    image = rgb.convert(mode)
    np.testing.assert_array_equal(pixels(saved(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 95, "subsampling": 0}])
def test_each_kind_of_jpeg_is_converted_by_pillow(rgb, mode, options) -> None:
    data = saved(rgb.convert(mode), "jpeg", **options)
    wanted = Image.open(io.BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(pixels(data, "jpeg"), np.asarray(wanted))


def on_white(colour: NDArray[Any], alpha: NDArray[Any]) -> NDArray[np.float64]:
    share = alpha.astype(np.float64)[..., None] / 255
    return colour * share + 255 * (1 - share)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_an_alpha_channel_is_composited_on_white(mode) -> None:
    array = picture(4)
    array[..., 3][:4] = 0
    array[..., 3][4:8] = 255
    image = Image.fromarray(array).convert(mode)
    colour = np.asarray(image.convert("RGBA")).astype(np.float64)
    found = pixels(saved(image))
    wanted = on_white(colour[..., :3], colour[..., 3])
    assert np.abs(found - wanted).max() <= 1
    assert (found[:4] == 255).all() and (found[4:8] == colour[4:8, :, :3]).all()


def test_transparent_entries_of_a_palette_are_composited_on_white(rgb) -> None:
    image = rgb.quantize(16)
    index, palette = np.asarray(image), np.asarray(image.getpalette()).reshape(-1, 3)[:16]
    alpha = np.arange(16) * 17
    found = pixels(saved(image, transparency=bytes(alpha.tolist())))
    assert np.abs(found - on_white(palette[index], alpha[index])).max() <= 1
    found = pixels(saved(image, transparency=3))
    wanted = np.where((index == 3)[..., None], 255, palette[index])
    np.testing.assert_array_equal(found, wanted)


def test_a_transparent_colour_is_white() -> None:
    array = picture()
    array[:3] = 10, 20, 30
    data = saved(Image.fromarray(array), transparency=(10, 20, 30))
    wanted = array.copy()
    wanted[:3] = 255
    np.testing.assert_array_equal(pixels(data), wanted)


def test_16_bits_a_channel_lose_their_lower_byte_and_16_bit_grey_is_refused() -> None:
    array = np.random.default_rng(1).integers(0, 1 << 16, (5, 4, 3))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    np.testing.assert_array_equal(pixels(png(4, 5, 16, 2, rows)), array >> 8)
    grey = b"".join(b"\0" + row[:, 0].astype(">u2").tobytes() for row in array)
    for call in (images.read_size, lambda *file: images.decode(*file, (32, 32))):
        with pytest.raises(ValueError, match="the image is grey with 16 bits a pixel; send it"):
            call(png(4, 5, 16, 0, grey), "png")


def test_only_the_first_frame_is_read_and_exif_turns_nothing(rgb) -> None:
    second = Image.fromarray(255 - picture())
    data = saved(rgb, save_all=True, append_images=[second, second], duration=9)
    assert b"fdAT" in data
    np.testing.assert_array_equal(pixels(data), np.asarray(rgb))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    for name in ("png", "jpeg"):
        turned = saved(rgb, name, exif=exif)
        assert b"Exif" in turned or b"eXIf" in turned
        np.testing.assert_array_equal(pixels(turned, name), pixels(saved(rgb, name), name))


def test_what_makes_no_pixels_never_reaches_the_decoder(rgb, monkeypatch) -> None:
    """Text that inflates, a second animation, a broken profile, Exif, comments: with warnings as
    errors and a decoder that would count the bytes it is given."""
    about = PngImagePlugin.PngInfo()
    about.add_text("a", "b" * 1_000_000, zip=True)
    plain = saved(rgb)
    data = saved(rgb, pnginfo=about, icc_profile=b"no profile")
    control = chunk(b"acTL", struct.pack(">II", 2, 0))
    data = data[:33] + control + control + chunk(b"iCCP", b"x") + data[33:]
    jpeg = saved(rgb, "jpeg")
    said = saved(rgb, "jpeg", comment=b"c" * 5000, exif=b"Exif\0\0MM nothing", xmp=b"x" * 5000)
    seen, load = [], ImageFile.ImageFile.load

    def counted(self):
        if self.fp is not None:
            seen.append(len(self.fp.getvalue()))
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(pixels(data), picture())
        np.testing.assert_array_equal(pixels(said, "jpeg"), pixels(jpeg, "jpeg"))
    assert seen[0] <= len(plain) and max(seen[1:]) <= len(jpeg)


def test_what_fills_the_space_between_segments_is_skipped(rgb) -> None:
    data = saved(rgb, "jpeg")
    for at in (2, data.index(b"\xff\xc0"), data.index(b"\xff\xda")):
        for filled in (b"\0\0\0", b"\xff\xff", b"ab\xff\0"):
            loose = data[:at] + filled * (at > 2 or filled[0] == 0xFF) + data[at:]
            wanted = np.asarray(Image.open(io.BytesIO(loose)))
            np.testing.assert_array_equal(pixels(loose, "jpeg"), wanted)


@pytest.mark.parametrize(
    ("data", "name", "wanted"),
    [
        (b"", "png", "the image is no PNG file"),
        (b"\xff\xd8", "jpeg", "the image is no JPEG file"),
        (b"GIF89a" + bytes(90), "png", "the image is no PNG file"),
        (b"GIF89a" + bytes(90), "gif", "the image's format must be png or jpeg, 'gif' came"),
        (images.SIGNATURE, "png", "the image ends early or is damaged"),
        (b"\xff\xd8\xff\xd9", "jpeg", "the image ends early or is damaged"),
        (b"\xff\xd8\xff\xda\0\0", "jpeg", "the image ends early or is damaged"),
        (png(0, 4, 8, 2, b""), "png", "the image ends early or is damaged"),
        (png(9, 9, 8, 9, b""), "png", "the image ends early or is damaged"),
        (png(9, 9, 8, 2, b""), "png", "the image ends early or is damaged"),
        (png(9, 9, 8, 2, b"x" * 9), "png", "the image ends early or is damaged"),
    ],
)
def test_what_is_no_such_file_is_refused(data, name, wanted) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        pixels(data, name)


def test_a_file_is_read_as_the_format_that_was_claimed(rgb) -> None:
    for name, other in (("png", "jpeg"), ("jpeg", "png")):
        with pytest.raises(ValueError, match=f"the image is no {other.upper()} file"):
            pixels(saved(rgb, name), other)


@pytest.mark.parametrize("name", ["png", "jpeg"])
def test_a_file_that_is_cut_anywhere_is_refused(rgb, name) -> None:
    data = saved(rgb, name)
    for end in {*range(0, len(data), 97), len(data) - 1, len(data) - 2}:
        with pytest.raises(ValueError, match=r"the image (is no|ends early or is damaged)"):
            pixels(data[:end], name)


def test_a_changed_bit_in_a_png_is_refused(rgb) -> None:
    data = saved(rgb)
    for at in range(8, len(data), 61):
        bad = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
        with pytest.raises(ValueError, match="the image "):
            pixels(bad)


def test_a_second_header_is_refused(rgb) -> None:
    data = saved(rgb)
    for bad in (data[:33] + data[8:33] + data[33:], data[:8] + data[33:]):
        with pytest.raises(ValueError, match="ends early or is damaged"):
            pixels(bad)
    data = saved(rgb, "jpeg")
    at = data.index(b"\xff\xc0")
    size = 2 + int.from_bytes(data[at + 2 : at + 4])
    for bad in (data[:at] + data[at : at + size] + data[at:], data[:at] + data[at + size :]):
        with pytest.raises(ValueError, match="ends early or is damaged"):
            pixels(bad, "jpeg")


def with_size(data: bytes, width: int, height: int) -> bytes:
    """A JPEG file whose header lies."""
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def test_the_size_is_checked_before_anything_is_decoded(rgb, monkeypatch) -> None:
    """A header of 60,000 × 60,000 costs nothing: no decoder is made."""
    monkeypatch.setattr(images, "_decoder", None)
    jpeg = saved(rgb, "jpeg")
    for name, data in (
        ("png", png(60_000, 60_000, 8, 2, b"")),
        ("jpeg", with_size(jpeg, 60_000, 60_000)),
    ):
        wanted = "the image has 60000 × 60000 pixels; at most 33554432 are taken"
        for call in (images.read_size, lambda *file: images.decode(*file, (32, 32))):
            with pytest.raises(ValueError, match=wanted):
                call(data, name)
    assert images.read_size(png(1 << 13, 1 << 12, 8, 2, b""), "png") == (1 << 12, 1 << 13)
    with pytest.raises(ValueError, match="33554433 bytes; at most 33554432 are taken"):
        images.read_size(bytes(images.BYTES_MAX + 1), "png")
    assert images.read_size(with_size(jpeg, 9, 5), "jpeg") == (5, 9)


def test_a_file_of_very_many_parts_is_refused_soon(rgb) -> None:
    data, jpeg = saved(rgb), saved(rgb, "jpeg", progressive=True)
    many = chunk(b"tEXt", b"a\0b") * (images.PARTS_MAX + 1)
    with pytest.raises(ValueError, match="more than 65536 chunks"):
        images.read_size(data[:33] + many + data[33:], "png")
    many = b"\xff\xfe\0\x02" * (images.PARTS_MAX + 1)
    with pytest.raises(ValueError, match="more than 65536 segments before its first scan"):
        images.read_size(jpeg[:2] + many + jpeg[2:], "jpeg")
    at = jpeg.rindex(b"\xff\xda")
    with pytest.raises(ValueError, match=r"the image has \d+ scans; at most 64 are read"):
        images.read_size(jpeg[:at] + jpeg[at:-2] * 70 + jpeg[-2:], "jpeg")


def test_12_bits_a_channel_are_refused_by_name(rgb) -> None:
    data = bytearray(saved(rgb, "jpeg"))
    data[data.index(b"\xff\xc0") + 4] = 12
    with pytest.raises(ValueError, match="12 bits a channel; JPEG files of 8 are taken"):
        images.read_size(bytes(data), "jpeg")


def test_a_failure_of_pillow_is_our_sentence_and_memory_is_not(rgb, monkeypatch) -> None:
    for error in (OSError("secret"), SyntaxError("secret"), AttributeError("secret")):

        def failing(self, error=error):
            raise error

        monkeypatch.setattr(ImageFile.ImageFile, "load", failing)
        with pytest.raises(ValueError, match=r"^the image ends early or is damaged$") as caught:
            pixels(saved(rgb))
        assert caught.value.__cause__ is None
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: bytearray(1 << 62))
    with pytest.raises(MemoryError):
        pixels(saved(rgb))


def test_without_pillow_an_image_is_refused_with_the_command_that_installs_it(
    rgb, monkeypatch
) -> None:
    data = saved(rgb)
    monkeypatch.setitem(sys.modules, "PIL.PngImagePlugin", None)
    assert images.read_size(data, "png") == (HEIGHT, WIDTH)
    with pytest.raises(RuntimeError, match=r"images need Pillow: pip install .*\[images\]"):
        images.decode(data, "png", (32, 32))
