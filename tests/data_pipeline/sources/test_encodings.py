"""Texts in their languages' encodings: the advice names the right one, or says that it does not know."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from small_corpus import documents_by_split

from moebius.data_pipeline.encodings import _ORDER, conversion, guessed, iconv_name
from moebius.data_pipeline.errors import InputError

WIDE = "utf_16 utf_16_le utf_16_be utf_32 utf_32_le utf_32_be"
# language: a text, and the codecs of Python's that its files are found in
TEXTS = {
    "fr": (
        "Le cœur a ses raisons que la raison ne connaît point ; à l'été où les forêts étaient déjà vertes, près de la rivière.",
        "cp1252 latin_1 iso8859_15 mac_roman cp850",
    ),
    "de": (
        "Falsches Üben quält jeden größeren Zwerg; die Straße führte über die Brücke, wo Mädchen schöne Äpfel aßen.",
        "cp1252 latin_1 mac_roman cp850 cp437",
    ),
    "es": (
        "El pingüino Wenceslao hizo kilómetros bajo lluvia y frío; añoraba a su querido cachorro. ¿Qué pasó mañana en España?",
        "cp1252 latin_1 mac_roman cp850",
    ),
    "pl": (
        "Pchnąć w tę łódź jeża lub ośm skrzyń fig. Zażółć gęślą jaźń, a później wróć do źródła i usiądź przy ścieżce.",
        "cp1250 iso8859_2 cp852",
    ),
    "cs": (
        "Příliš žluťoučký kůň úpěl ďábelské ódy. Když přišel večer, děti šly domů a psi štěkali na měsíc.",
        "cp1250 iso8859_2 cp852",
    ),
    "hu": (
        "Árvíztűrő tükörfúrógép. Az őszi szél végigsöpört a mezőn, és a gyerekek hazafelé indultak a hűvös estében.",
        "cp1250 iso8859_2",
    ),
    "ru": (
        "Съешь же ещё этих мягких французских булок, да выпей чаю. В начале лета мы поехали к морю и долго гуляли по берегу.",
        "cp1251 koi8_r iso8859_5 cp866 mac_cyrillic",
    ),
    "uk": (
        "Жебракують філософи при ґанку церкви в Гадячі, ще й шатро їхнє п'яне знаємо. Їжак їсть яблуко у своїй хаті.",
        "cp1251 koi8_u",
    ),
    "bg": (
        "Жълтата дюля беше щастлива, че пухът, който цъфна, замръзна като гьон. Вечерта децата се върнаха у дома.",
        "cp1251 iso8859_5",
    ),
    "el": (
        "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Το βράδυ τα παιδιά γύρισαν στο σπίτι και μίλησαν με τη γιαγιά τους.",
        "cp1253 iso8859_7",
    ),
    "he": (
        "דג סקרן שט בים מאוכזב ולפתע מצא חברה. הילדים חזרו הביתה בערב ודיברו עם סבתא שלהם על היום.",
        "cp1255 iso8859_8",
    ),
    "ar": (
        "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق. عاد الأولاد إلى البيت في المساء.",
        "cp1256 iso8859_6",
    ),
    "tr": (
        "Pijamalı hasta yağız şoföre çabucak güvendi. Akşam çocuklar eve döndü ve büyükanneleriyle konuştular.",
        "cp1254 iso8859_9",
    ),
    "ja": (
        "いろはにほへと ちりぬるを。吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。子供は家へ帰りました。",
        "shift_jis cp932 euc_jp iso2022_jp",
    ),
    "zh": (
        "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。孩子们晚上回到家里，和奶奶谈论了这一天发生的事情。学而时习之，不亦说乎。",
        "gb2312 gbk gb18030",
    ),
    "zht": (
        "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。孩子們晚上回到家裡，和奶奶談論了這一天發生的事情。學而時習之，不亦說乎。",
        "big5 big5hkscs gb18030",
    ),
    "ko": (
        "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 아이들은 저녁에 집으로 돌아와 할머니와 이야기했다.",
        "euc_kr cp949 johab iso2022_kr",
    ),
    "th": (
        "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน เด็กๆ กลับบ้านในตอนเย็นและคุยกับคุณยาย",
        "tis_620 cp874",
    ),
    "vi": (
        "Con sói và con cừu gặp nhau bên bờ suối. Tối đó lũ trẻ trở về nhà và nói chuyện với bà của chúng.",
        "cp1258",
    ),
    "sv": (
        "Flygande bäckasiner söka hwila på mjuka tuvor. Barnen gick hem på kvällen och pratade med sin mormor på ön i ån.",
        "cp1252 latin_1",
    ),
    "da": (
        "Quizdeltagerne spiste jordbær med fløde, mens cirkusklovnen Walther spillede på xylofon. Børnene gik hjem på øen.",
        "cp1252 latin_1",
    ),
    "is": (
        "Kæmi ný öxi hér, ykist þjófum nú bæði víl og ádrepa. Börnin fóru heim um kvöldið og töluðu við ömmu sína.",
        "cp1252",
    ),
    "en": (
        "The café’s naïve owner said “touché” — and the price was £5 or €6 for a piñata… résumé, façade, Zoë’s coöperation.",
        "cp1252 mac_roman",
    ),
}
CASES = [
    (f"{text}\n", codec)
    for text, codecs in TEXTS.values()
    for codec in f"{codecs} {WIDE}".split()
    if not codec.startswith("iso2022")
]
CODECS = {iconv_name(codec): codec for codec in _ORDER}


def test_most_texts_get_the_right_encoding_first_and_nearly_all_among_the_named() -> None:
    """A letter that a codec lacks is left out, as in files that people have."""
    ranks = []
    for text, codec in CASES:
        data = text.encode(codec, "ignore")
        right = data.decode(codec)
        read = [data.decode(CODECS[name], "replace").lstrip("\ufeff") for name in guessed(data)]
        assert read, (codec, text)
        ranks.append(read.index(right) if right in read else 9)
    assert sum(rank == 0 for rank in ranks) > 0.92 * len(CASES)
    assert sum(rank < 9 for rank in ranks) > 0.97 * len(CASES)


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
def test_iconv_knows_every_name() -> None:
    listed = subprocess.check_output(["iconv", "-l"], text=True)
    assert {*CODECS} <= {*listed.replace("/", " ").replace(",", " ").split()}


ADVICE = {
    b"caf\xe9": r"may be CP1252 \('café'\), CP1251 \('cafй'\), .*: iconv -f CP1252 -t UTF-8 OLD > NEW",
    bytes(range(256)) * 3: "encoding is unknown.*iconv -f ENCODING",
    "naïve café, ".encode() * 9 + b"\xe9": "Nearly all of its text is UTF-8",
    TEXTS["th"][0].encode("cp874"): "^Convert the file first: iconv -f CP874",
}


@pytest.mark.parametrize("data", ADVICE)
def test_the_advice_is_as_sure_as_the_bytes(data: bytes) -> None:
    assert re.search(ADVICE[data], conversion(data))


FILES = {
    "UTF-16LE": TEXTS["zh"][0].replace("\n", ""),
    "CP932": TEXTS["ja"][0],
    "ISO-2022-JP": TEXTS["ja"][0],
    "KOI8-R": TEXTS["ru"][0],
}


@pytest.mark.parametrize("encoding", FILES)
def test_a_file_is_refused_with_the_command_that_converts_it(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(FILES[encoding].encode(encoding))
    with pytest.raises(InputError, match=f"iconv -f {encoding} -t UTF-8 OLD > NEW"):
        documents_by_split(tmp_path / "a.txt")


def test_the_fault_far_behind_the_head_decides(tmp_path: Path) -> None:
    text = "plain words\n" * 200_000 + FILES["KOI8-R"]
    (tmp_path / "a.txt").write_bytes(text.encode("koi8-r"))
    with pytest.raises(InputError, match=r"not UTF-8 .*iconv -f KOI8-R"):
        documents_by_split(tmp_path / "a.txt")
