"""Decodes the images of a request, in the service's threads, once there is memory for it.

What decoding takes is known from the headers, and counted with the bytes of bodies that come in.
"""

from collections.abc import Sequence

from tinsmith.engine.image_cache import HeldImage, ImageCache
from tinsmith.server.http.overload import Reservation
from tinsmith.server.service.service import Service
from tinsmith.server.wire.chunking import LARGE
from tinsmith.server.wire.images import PlacedImage


async def hold_images(
    service: Service, arrival: Reservation, placed: Sequence[PlacedImage], came: int = 0
) -> list[HeldImage]:
    """The images in their order. They keep their pixels, so whoever uses their ids must keep them.
    `came` are bytes of the request that are not counted yet: JSON's texts, and files made of
    them."""
    if not placed:
        return []
    cache, found = service.images, list[HeldImage]()
    await arrival.take(came + cache.needs([one.image for one in placed]))
    for one in placed:
        held = cache.find(one.image)
        if held is None:
            held = await service.beside(LARGE, _hold, cache, one)
        found.append(held)
    arrival.complete()
    return found


def _hold(cache: ImageCache, one: PlacedImage) -> HeldImage:
    try:
        return cache.hold(one.image)
    except ValueError as error:
        raise ValueError(f"{one.where}: {error}") from None
