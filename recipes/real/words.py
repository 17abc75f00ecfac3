"""Topics and words of the instructions task. The first of each list are held out
(``recipes/real/instructions.py``)."""

from __future__ import annotations

_TOPICS = """
 a lighthouse; bread; the first snow; a train journey; bees; an old photograph; tea; the moon; a
market; a violin; rain; a library; mountains; a bicycle; chess; spring; the ocean; a garden;
coffee; a letter; football; a bridge; dreams; a forest; pottery; candles; a birthday; honey; a
clock; the desert; swimming; a farm; owls; silence; a kite; painting; a village; thunder; apples;
a museum; sleep; camping; a lake; salt; friendship; an island; autumn leaves; a piano; street
food; butterflies; a map; winter evenings; a harbor; dancing; cheese; a storm; a park bench; maps
of the stars; cooking for friends; a long walk; dogs; cats; the sun; a river; music; a city at
night; paper; a teacher; horses; wind; a castle; the color blue; glass; a picnic; poetry; a robot;
sailing; a mirror; breakfast; wolves; a theater; stones; learning to read; a fireplace; airplanes;
oranges; the number seven; shoes; an umbrella; whales; a waterfall; soup; a school; planets;
gardens in rain; a doctor; ice; a camera; running; wool; a windmill; elephants; a tower;
grandparents; rice; a song; the beach; a carpenter; volcanoes; a notebook; roses; a bakery; trust;
penguins; a tunnel; memory; a fisherman; clouds; gold; a tent; patience; a drum; strawberries; a
neighbor; fog; skiing; a puzzle; turtles; a window; laughter; wood; a ferry; hunger; a crown;
potatoes; a meadow; courage; an engine; foxes; a cellar; sand; a chair; the alphabet; pumpkins; a
journey by sea; a nurse; rainbows; a key; hope; an orchestra; a mill; leather; snakes; a fountain;
weather; ducks; a blanket; time; a balloon; lemons; a knight; honesty; tigers; a valley; milk; a
joke; seeds; a hotel; frogs; a secret; chocolate; a sculpture; the north; a ladder; mushrooms; an
athlete; cotton; a wedding; ants; a cave; jazz; a diary; corn; a captain
"""
_WORDS = """
 evening orange quiet silver bridge window lantern marble ribbon velvet harvest copper meadow
thunder pocket garden feather island mirror candle winter basket anchor temple shadow planet sugar
needle engine valley button pepper forest signal cotton ladder purple number castle summer river
golden kitchen letter mountain paper simple bright story morning travel wooden market yellow
friend stone gentle music hidden ocean early painter little secret tower honest answer leather
corner breeze people center dinner flower spirit doctor season battle animal record family circle
dragon future master nature parent rocket school spring stream strong ticket travelers voyage
wonder writer crystal journal kingdom library machine message monster mystery picture present
promise rainbow student teacher village weather whisper balance builder captain comfort country
diamond
"""
TOPICS = tuple(topic.strip() for topic in _TOPICS.replace("\n", " ").split(";") if topic.strip())
WORDS = tuple(_WORDS.split())
