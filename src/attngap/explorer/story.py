"""A page to show what is recalled from afar: the demo's prompt and the explorer's text for two models."""

# Longer than sinks and window, with something at the start to recall: within the window both models are equal.
STORY = (
    "The code word for the north gate is marigold. Nobody wrote it down; the keeper told it to her daughter, and "
    "the daughter remembered it. The house stood on a hill above the river. In the morning the fog came up from the"
    " water and covered the lower fields, so that only the roofs and the tops of trees could be seen. By noon it "
    "was gone. The road from the village led past the mill, over a stone bridge and through a wood of old beeches. "
    "Carts came up twice a week with flour, lamp oil and letters. Behind the house lay a garden with apple trees, "
    "and behind the garden a meadow where two horses grazed from spring until the first frost. The kitchen had a "
    "long table, a stove of green tiles and a window from which one saw the whole valley, and on clear days the "
    "snow on the mountains far to the south. In winter, when the road was closed, the people of the house lived on "
    "what they had stored, and in the evenings they sat by the fire and told each other stories of the sea, which "
    "most of them had never seen. An uncle had once sailed on a ship with three masts. He knew the names of the "
    "winds, and he had brought home a clock that still showed the time of a harbor on the other side of the world. "
    "Nobody ever set it right. One day a stranger came up the road, late in the afternoon, with dust on his boots "
    "and a letter in his hand. He asked to be let in at the north gate. The keeper's daughter asked him for the "
    'code word. The stranger answered: "The code word for the north gate is'
)
