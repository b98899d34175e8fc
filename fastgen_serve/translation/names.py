"""Languages: the code in use (ISO 639-1 if it exists, else ISO 639-3), other codes for it, its English name."""

from __future__ import annotations

# Other codes are from ISO 639-3 (checkpoints such as NLLB-200 use that of the most common variety), or obsolete.
_TABLE = """
ace - Acehnese
acm - Mesopotamian Arabic
acq - Ta'izzi-Adeni Arabic
aeb - Tunisian Arabic
af afr Afrikaans
ajp - South Levantine Arabic
ak aka Akan
am amh Amharic
an arg Aragonese
apc - North Levantine Arabic
ar ara,arb Arabic
ars - Najdi Arabic
ary - Moroccan Arabic
arz - Egyptian Arabic
as asm Assamese
ast - Asturian
av ava Avaric
awa - Awadhi
ay aym,ayr Aymara
az aze,azj Azerbaijani
azb - South Azerbaijani
ba bak Bashkir
ban - Balinese
be bel Belarusian
bem - Bemba
bg bul Bulgarian
bho - Bhojpuri
bi bis Bislama
bjn - Banjar
bm bam Bambara
bn ben Bengali
bo bod Tibetan
br bre Breton
bs bos Bosnian
bug - Buginese
ca cat Catalan
ceb - Cebuano
cjk - Chokwe
ckb - Central Kurdish
co cos Corsican
crh - Crimean Tatar
cs ces,cze Czech
cv chv Chuvash
cy cym,wel Welsh
da dan Danish
de deu,ger German
dik din Dinka
dv div Dhivehi
dyu - Dyula
dz dzo Dzongkha
ee ewe Ewe
el ell,gre Greek
en eng English
eo epo Esperanto
es spa Spanish
et est,ekk Estonian
eu eus,baq Basque
fa fas,pes,per Persian
ff ful,fuv Fulah
fi fin Finnish
fj fij Fijian
fo fao Faroese
fon - Fon
fr fra,fre French
fur - Friulian
fy fry Western Frisian
ga gle Irish
gd gla Scottish Gaelic
gl glg Galician
gn grn Guarani
gu guj Gujarati
gv glv Manx
ha hau Hausa
he heb,iw Hebrew
hi hin Hindi
hne - Chhattisgarhi
hr hrv Croatian
hsb - Upper Sorbian
ht hat Haitian Creole
hu hun Hungarian
hy hye,arm Armenian
ia ina Interlingua
id ind,in Indonesian
ig ibo Igbo
ilo - Ilocano
io ido Ido
is isl,ice Icelandic
it ita Italian
iu iku Inuktitut
ja jpn Japanese
jv jav Javanese
ka kat,geo Georgian
kab - Kabyle
kac - Jingpho
kam - Kamba
kbp - Kabiye
kea - Kabuverdianu
kg kon Kongo
ki kik Kikuyu
kk kaz Kazakh
kl kal Greenlandic
km khm Khmer
kmb - Kimbundu
kn kan Kannada
ko kor Korean
kr kau,knc Kanuri
ks kas Kashmiri
ku kur,kmr Kurdish
kv kom Komi
kw cor Cornish
ky kir Kyrgyz
la lat Latin
lb ltz Luxembourgish
lg lug Ganda
li lim Limburgish
lij - Ligurian
lmo - Lombard
ln lin Lingala
lo lao Lao
lt lit Lithuanian
ltg - Latgalian
lua - Luba-Kasai
luo - Luo
lus - Mizo
lv lav,lvs Latvian
mag - Magahi
mai - Maithili
mg mlg,plt Malagasy
mh mah Marshallese
mi mri,mao Maori
min - Minangkabau
mk mkd,mac Macedonian
ml mal Malayalam
mn mon,khk Mongolian
mni - Manipuri
mos - Mossi
mr mar Marathi
ms msa,zsm,zlm,may Malay
mt mlt Maltese
my mya,bur Burmese
nb nob Norwegian Bokmål
ne nep,npi Nepali
nl nld,dut Dutch
nn nno Norwegian Nynorsk
no nor Norwegian
ns nso Northern Sotho
nus - Nuer
nv nav Navajo
ny nya Chichewa
oc oci Occitan
om orm,gaz Oromo
or ori,ory Odia
os oss Ossetian
pa pan Punjabi
pag - Pangasinan
pap - Papiamento
pl pol Polish
prs - Dari
ps pus,pbt Pashto
pt por Portuguese
qu que,quy Quechua
rm roh Romansh
rn run Rundi
ro ron,rum,mo Romanian
ru rus Russian
rw kin Kinyarwanda
sa san Sanskrit
sat - Santali
sc srd Sardinian
scn - Sicilian
sd snd Sindhi
se sme Northern Sami
sg sag Sango
shn - Shan
si sin Sinhala
sk slk,slo Slovak
sl slv Slovenian
sm smo Samoan
sn sna Shona
so som Somali
sq sqi,als,alb Albanian
sr srp Serbian
ss ssw Swati
st sot Southern Sotho
su sun Sundanese
sv swe Swedish
sw swa,swh Swahili
szl - Silesian
ta tam Tamil
taq - Tamasheq
te tel Telugu
tg tgk Tajik
th tha Thai
ti tir Tigrinya
tk tuk Turkmen
tl tgl,fil Tagalog
tn tsn Tswana
to ton Tongan
tpi - Tok Pisin
tr tur Turkish
ts tso Tsonga
tt tat Tatar
tum - Tumbuka
tw twi Twi
ty tah Tahitian
tzm - Central Atlas Tamazight
udm - Udmurt
ug uig Uyghur
uk ukr Ukrainian
umb - Umbundu
ur urd Urdu
uz uzb,uzn Uzbek
ve ven Venda
vec - Venetian
vi vie Vietnamese
vo vol Volapük
wa wln Walloon
war - Waray
wo wol Wolof
xh xho Xhosa
yi yid,ydd,ji Yiddish
yo yor Yoruba
yue - Cantonese
za zha Zhuang
zh zho,cmn,chi Chinese
zu zul Zulu
"""

# Scripts that a code may name (ISO 15924), and how the language's name then ends.
SCRIPTS = {
    "Arab": "Arabic script",
    "Beng": "Bengali script",
    "Cyrl": "Cyrillic",
    "Deva": "Devanagari",
    "Hans": "simplified",
    "Hant": "traditional",
    "Latn": "Latin script",
    "Tfng": "Tifinagh",
}

NAMES: dict[str, str] = {}
OTHER_CODES: dict[str, str] = {}
for _code, _others, _name in (line.split(" ", 2) for line in _TABLE.strip().splitlines()):
    NAMES[_code] = _name
    OTHER_CODES.update(dict.fromkeys(_others.replace("-", "").split(","), _code))
OTHER_CODES.pop("", None)
