"""Requests and beginnings of many shapes, made from the word lists: what a drafter learns from beside those that the
target was made with, so that it also knows how the target goes on where nobody has asked like that before."""

import random

from default_model import words
from default_model.prompts import article, capital

TAILS = ("", "", "", "", " Please.", " Keep it short.", " Use easy words.", " Answer in one sentence.", " Thank you!")


class Words:
    """One of each kind, as it stands in a sentence."""

    def __init__(self, pick: random.Random) -> None:
        self.name, self.other_name = pick.sample(words.NAMES, 2)
        self.animal, self.other_animal = pick.sample(words.ANIMALS, 2)
        self.person, self.quality = pick.choice(words.PEOPLE), pick.choice(words.QUALITIES)
        self.object, self.other_object = pick.sample(words.OBJECTS, 2)
        self.thing, self.other_thing = pick.sample(words.THINGS, 2)
        self.place, self.time = pick.choice(words.PLACES), pick.choice(words.TIMES)
        self.to_do, self.event = pick.choice(words.ACTIVITIES), pick.choice(words.EVENTS)
        self.occasion, self.scene = pick.choice(words.OCCASIONS), pick.choice(words.SCENES)
        self.habit, self.task = pick.choice(words.HABITS), pick.choice(words.TASKS)
        noun = pick.choice([self.animal, self.person])
        self.hero = pick.choice([article(noun), article(f"{self.quality} {noun}"), f"my {noun}", f"the {noun}"])
        self.subject = pick.choice([self.hero, self.thing, self.scene, article(self.object), self.name, self.occasion])


def free_request(pick: random.Random) -> str:
    w = Words(pick)
    asked = pick.choice(
        [
            f"Do you like {w.subject}?",
            f"I saw {w.hero} {w.place} today. Is that normal?",
            f"Where does {w.hero} sleep?",
            f"What does {w.hero} eat {w.time}?",
            f"Is {w.thing} useful?",
            f"My friend {w.name} has {article(w.object)}. Should I get one too?",
            f"I want to {w.to_do} {w.time}. Is that a good plan?",
            f"Make up a short poem about {w.subject}.",
            f"Who is {w.name}?",
            f"What can we learn from {w.hero}?",
            f"Imagine {w.hero} {w.place}. Go on from there.",
            f"Finish this story: {capital(w.event)}.",
            f"Give {w.name} some advice about {w.occasion}.",
            f"What did {w.name} do {w.place}?",
            f"Compare {w.thing} and {w.other_thing}.",
            f"How does {w.hero} feel if {w.event}?",
            f"Help! {capital(w.event)}.",
            f"Write a song for {w.name}, who loves to {w.to_do}.",
            f"Who needs {article(w.object)}?",
            f"Can {w.hero} {w.to_do}?",
            f"Tell {w.name} a joke about {w.subject}.",
            f"Write about {w.hero} and {article(w.object)} {w.place}.",
            f"Why does {w.hero} need {article(w.object)}?",
            f"What would the world be without {w.thing}?",
            f"Talk to me as if you were {w.hero}.",
            f"{w.name} is {w.quality} today. How can I help?",
            f"Is it better to {w.to_do} or to {w.habit}?",
            f"I have {article(w.object)} and {article(w.other_object)}. What can I make of them?",
            f"{w.name} asked me about {w.subject}. What do I say?",
            f"Teach me something about {w.subject}.",
            f"I do not understand {w.thing}.",
            f"When should one {w.task}?",
            f"{capital(w.hero)} and {article(w.other_animal)} meet {w.place}. What do they talk about?",
            f"Thank {w.name} for {w.occasion}.",
            f"{capital(w.subject)}",
        ]
    )
    return asked + pick.choice(TAILS) if asked[-1] in ".?!" else asked


def free_opening(pick: random.Random) -> str:
    w = Words(pick)
    return pick.choice(
        [
            f"{w.name} and {w.other_name} wanted to {w.to_do}, but {w.event}.",
            f"{capital(w.hero)} had {article(w.object)} and {article(w.other_object)}.",
            f"When {w.event}, {w.name} did not know what to do.",
            f"Yesterday, {w.name} saw {w.hero} {w.place}.",
            f"I like {w.thing} because it is {w.quality}.",
            f'"{w.name}, look at that {w.object}!" said {w.hero}.',
            f"Some people like to {w.to_do}, and others like to {w.habit}.",
            f"If you want to {w.task}, do not forget your {w.object}.",
            f"{capital(w.subject)} and {w.hero} have something in common.",
            f"Nobody knew why {w.hero} lived {w.place}.",
            f"{capital(w.time)}, {w.name} likes to {w.to_do}.",
            f"After {w.occasion}, {w.name} and {w.hero} went home.",
            f"There are many kinds of {w.animal}s. Some of them live {w.place}.",
            f'{w.name}: "Can you {w.to_do}?"\n{w.other_name}: "',
            f"{w.name} was {w.quality}. {w.other_name} was not. One day, {w.event}.",
            f"The {w.object} was gone. {w.name} looked {w.place}, but",
            f"{capital(w.thing)} and {w.other_thing} are not the same.",
            f"We must {w.habit}, said {w.hero}, or else",
        ]
    )
