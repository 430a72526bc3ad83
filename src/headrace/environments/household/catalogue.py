"""What there is in a house: receptacles, objects, what may lie where, what can be done to what. The placement rules are ALFRED's."""

from __future__ import annotations


def _types(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Receptacle type to the object types that it may hold.
MAY_HOLD: dict[str, frozenset[str]] = {
    receptacle: _types(objects)
    for receptacle, objects in {
        "ArmChair": "BasketBall Book Box CellPhone Cloth CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
        "BathtubBasin": "Cloth DishSponge HandTowel SoapBar",
        "Bed": "BaseballBat BasketBall Book CellPhone Laptop Newspaper Pillow TennisRacket",
        "Cabinet": "Book Bowl Box CD Candle Cloth Cup DishSponge Glassbottle HandTowel Kettle Ladle Mug Newspaper Pan PepperShaker "
        "Plate Plunger Pot SaltShaker SoapBar SoapBottle SprayBottle TissueBox ToiletPaper ToiletPaperRoll Vase "
        "WateringCan WineBottle",
        "Cart": "Candle Cloth DishSponge HandTowel Mug PaperTowel Plunger SoapBar SoapBottle SprayBottle Statue TissueBox "
        "ToiletPaper ToiletPaperRoll Vase",
        "CoffeeMachine": "Mug",
        "Desk": "AlarmClock BasketBall Book Bowl Box CD Candle CellPhone Cloth CreditCard Cup Glassbottle KeyChain Laptop Mug "
        "Newspaper Pen Pencil Plate RemoteControl SoapBottle SprayBottle Statue TennisRacket TissueBox ToiletPaper "
        "ToiletPaperRoll Vase Watch WateringCan WineBottle",
        "Drawer": "Book ButterKnife CD Candle CellPhone Cloth CreditCard DishSponge Fork HandTowel KeyChain Knife Ladle Newspaper "
        "Pen Pencil PepperShaker RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon SprayBottle TissueBox "
        "ToiletPaper ToiletPaperRoll Watch WateringCan",
        "Dresser": "AlarmClock BasketBall Book Bowl Box CD Candle CellPhone Cloth CreditCard Cup Glassbottle KeyChain Laptop Mug "
        "Newspaper Pen Pencil Plate RemoteControl SprayBottle Statue TennisRacket TissueBox ToiletPaper ToiletPaperRoll "
        "Vase Watch WateringCan WineBottle",
        "Fridge": "Apple Bowl Bread Cup Egg Glassbottle Lettuce Mug Pan Plate Pot Potato Tomato WineBottle",
        "GarbageCan": "Apple Bread CD Cloth DishSponge Egg HandTowel Lettuce Newspaper PaperTowel Pen Pencil Potato SoapBar SoapBottle "
        "SprayBottle TissueBox ToiletPaper ToiletPaperRoll Tomato WineBottle",
        "HandTowelHolder": "HandTowel",
        "LaundryHamper": "Cloth",
        "Microwave": "Apple Bowl Bread Cup Egg Glassbottle Mug Plate Potato Tomato",
        "Ottoman": "BasketBall Book Box CellPhone Cloth CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
        "Safe": "CD CellPhone CreditCard KeyChain Statue Vase Watch",
        "Shelf": "AlarmClock Book Bowl Box CD Candle CellPhone Cloth CreditCard Cup DishSponge Glassbottle HandTowel Kettle "
        "KeyChain Mug Newspaper PaperTowel Pen Pencil PepperShaker Plate Pot RemoteControl SaltShaker SoapBar SoapBottle "
        "SprayBottle Statue TissueBox ToiletPaper ToiletPaperRoll Vase Watch WateringCan WineBottle",
        "SinkBasin": "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Glassbottle HandTowel Kettle Knife Ladle Lettuce Mug Pan "
        "Plate Pot Potato SoapBar Spatula Spoon Tomato",
        "Sofa": "BasketBall Book Box CellPhone Cloth CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
        "StoveBurner": "Kettle Pan Pot",
        "TVStand": "TissueBox",
        "Toaster": "",
        "Toilet": "Candle Cloth DishSponge HandTowel Newspaper PaperTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper "
        "ToiletPaperRoll",
        "ToiletPaperHanger": "ToiletPaper ToiletPaperRoll",
        "TowelHolder": "Towel",
    }.items()
}
_TABLE = _types(
    "AlarmClock Apple BaseballBat BasketBall Book Bowl Box Bread ButterKnife CD Candle CellPhone Cloth CreditCard Cup "
    "DishSponge Egg Fork Glassbottle HandTowel Kettle KeyChain Knife Ladle Laptop Lettuce Mug Newspaper Pan PaperTowel Pen "
    "Pencil PepperShaker Plate Pot Potato RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon SprayBottle Statue "
    "TennisRacket TissueBox ToiletPaper ToiletPaperRoll Tomato Vase Watch WateringCan WineBottle"
)
MAY_HOLD.update(dict.fromkeys(("CoffeeTable", "CounterTop", "DiningTable", "SideTable"), _TABLE))

OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})

CLEANABLE = _types(
    "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Kettle Knife Ladle Lettuce Mug Pan Plate Pot Potato SoapBar Spatula Spoon Tomato"
)
HEATABLE = _types("Apple Bread Cup Egg Mug Plate Potato Tomato")
COOLABLE = _types("Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato WineBottle")
SLICEABLE = _types("Apple Bread Egg Lettuce Potato Tomato")
VESSELS = _types("Bowl Box Cup Mug Pan Plate Pot")
LAMPS = frozenset({"DeskLamp"})
#: Where a lamp may stand; nobody can carry it away.
LAMP_PLACES = ("Desk", "SideTable", "Dresser", "DiningTable", "CoffeeTable", "Shelf")
