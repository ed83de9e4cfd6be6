"""A few paragraphs of plain English for trained models: what they read must not be noise to them."""

from __future__ import annotations

CLOCK = """\
The clock in the tower of Amberley had been made by a smith who had never seen another clock. \
He had heard of them from a merchant, and he built what he had heard: a drum with a rope and a \
stone, a row of wheels, and a bell the size of a bucket. It struck the hours well enough, but it \
lost nine minutes between one Sunday and the next, so every Sunday after church his daughter Ruth \
climbed the eighty-two steps with a candle and moved the great wheel forward by three teeth. She \
did that for forty years. When she was too old for the steps, the council asked a clockmaker from \
the city what a new one would cost. He looked at the wheels for a whole morning, asked for a file, \
and took a little off one tooth. The clock has kept time since then, and nobody climbs the tower \
any more, except for the swallows, which do not need the steps.
"""
BREAD = """\
Good bread needs four things: flour, water, salt and time. Mix five hundred grams of flour with \
three hundred and fifty grams of water, and let it rest for half an hour before you add ten grams \
of salt and a spoon of starter. Fold the dough four times, once every half hour, and keep it \
covered in between. After the last fold it should feel like a soft pillow and hold its shape for a \
moment when you lift it. Put it in a cold place for the night. In the morning heat the oven with \
the iron pot inside until both are very hot, turn the dough into the pot, cut it once across the \
top, and close the lid. Bake it for twenty-five minutes, take the lid off, and bake it for another \
twenty until the crust is dark brown. Then comes the hardest part: wait an hour before you cut it, \
because the inside is still cooking while it cools.
"""
RIVER = """\
A river is never the same shape twice. Where it bends, the water on the outside has further to go \
and runs faster, and it takes earth from that bank; on the inside it runs slower and lets sand \
fall. So every bend grows a little each year, until two bends meet and the river cuts through the \
neck between them. What remains of the old bend is a lake in the form of a horn. In dry summers \
such lakes shrink to a line of pools, in which fish wait for the flood that will take them back. \
Farmers who own land along a river know this well. Their fields become smaller on one side and \
larger on the other, and the courts have had to decide, again and again, who owns the island that \
was not there when the grandfather bought the farm. The rule that most of them found is old: what \
comes slowly belongs to the bank where it comes, and what comes at once belongs to nobody.
"""
LETTER = """\
Dear Margaret, thank you for your letter and for the seeds, which came dry and whole. I have put \
the beans along the south wall and the poppies where the old shed stood. You ask how the house is. \
The roof is tight again, and the stove draws better since the mason was here, but the stairs still \
complain at night as if someone were walking on them who cannot make up his mind. The children \
next door have taken the low part of the fence for a gate. I do not mind it; they bring me news, \
and last week a hedgehog in a hat. In October the train will stop in the valley again, they say, \
and if that is true then I hope that you will come for as long as you can stand the wind. I will \
air the blue room. Please bring the photographs of the summer when father built the boat, because \
I can no longer say which of us fell into the water first, and your brother tells it wrongly.
"""
STORY = CLOCK + BREAD + RIVER + LETTER
"""Some 850 tokens."""
QUESTIONS = (
    "Who climbed the tower every Sunday, and why? The answer:",
    "How much flour does the bread need? The answer:",
    "What is left where a river cuts through a bend? The answer:",
)
"""No two begin with the same token."""
