from __future__ import annotations

import os

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from passlora.config import DataConfig
from passlora.data.class_names import check_class_name
from passlora.data.dataset import load_dataset
from passlora.data.pictures import to_rgb
from passlora.data.rows import hold_out
from passlora.errors import PassloraError

datasets = pytest.importorskip("datasets")


def load(path, seed=0, **options):
    return load_dataset(DataConfig(dataset_name=str(path), **options), seed)


def table(count=6, classes=("ant", "bee"), size=(10, 8)):
    """A table in the Hub's layout, images as PNG bytes."""
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3)).astype(np.uint8)) for _ in range(count)]
    labels = [i % len(classes) for i in range(count)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(classes))})
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features), images


def test_digits():
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.class_names == [str(d) for d in range(10)]
    image = data.train.rgb(0)
    assert image.mode == "RGB" and image.size == (8, 8)
    assert 200 < np.asarray(image).max() <= 255


def test_an_image_folder_with_splits(image_tree):
    data = load(image_tree())
    assert (len(data.train), len(data.test)) == (12, 12)
    assert data.class_names == ["cat", "dog", "owl"]
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.train.rgb(0).size == (40, 30)


def test_an_image_folder_without_splits_gets_a_stratified_hold_out(image_tree):
    root = image_tree(splits=(), count=5)
    data, again, other = load(root), load(root), load(root, seed=1)
    assert np.bincount(data.test.labels).tolist() == [1, 1, 1]
    assert np.bincount(data.train.labels).tolist() == [4, 4, 4]
    paths = lambda split: {split.rows.describe(i) for i in range(len(split))}
    assert not paths(data.train) & paths(data.test)
    assert paths(data.test) == paths(again.test) != paths(other.test)


def test_a_class_of_one_image_is_never_held_out():
    data = load("digits")
    few = data.train.labels.copy()
    few[:] = 0
    few[5] = 1
    data.train.labels = few
    train, test = hold_out(data.train, 0.5, 0)
    assert (train.labels == 1).sum() == 1 and (test.labels == 1).sum() == 0


def test_a_validation_folder_is_found(image_tree):
    assert len(load(image_tree(splits=("train", "val"))).test) == 12


def test_grey_palette_and_16_bit_images_become_rgb(image_tree, tmp_path):
    for mode in ("L", "P", "RGBA", "CMYK", "1"):
        assert to_rgb(Image.new(mode, (4, 4))).mode == "RGB"
    deep = Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16))
    assert np.asarray(to_rgb(deep)).tolist() == np.full((4, 4, 3), 0x80).tolist()
    assert load(image_tree(mode="L")).train.rgb(0).mode == "RGB"


def test_sideways_photographs_are_turned_upright(tmp_path):
    image = Image.new("RGB", (20, 10))
    exif = image.getexif()
    exif[0x0112] = 6  # rotated by 90 degrees
    image.save(tmp_path / "x.jpg", exif=exif)
    assert to_rgb(Image.open(tmp_path / "x.jpg")).size == (10, 20)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "one file"])
def test_tables(tmp_path, kind):
    made, images = table()
    if kind == "parquet":
        made.to_parquet(tmp_path / "train-0.parquet")
        made.select(range(2)).to_parquet(tmp_path / "test-0.parquet")
        data = load(tmp_path)
    elif kind == "arrow":
        for name, part in (("train", made), ("validation", made.select(range(2)))):
            part.save_to_disk(tmp_path / "saved" / name)
            (tmp_path / "flat").mkdir(exist_ok=True)
            source = next((tmp_path / "saved" / name).glob("*.arrow"))
            source.rename(tmp_path / "flat" / f"{name}.arrow")
        data = load(tmp_path / "flat")
    elif kind == "saved":
        datasets.DatasetDict(train=made, test=made.select(range(2))).save_to_disk(tmp_path / "d")
        data = load(tmp_path / "d")
    else:
        made.to_parquet(tmp_path / "all.parquet")
        data = load(tmp_path / "all.parquet", test_fraction=0.34)
        assert (len(data.train), len(data.test)) == (4, 2)
        return
    assert data.class_names == ["ant", "bee"]
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1] and len(data.test) == 2
    assert np.array_equal(np.asarray(data.train.rgb(3)), np.asarray(images[3]))


def test_text_labels_and_other_column_names(tmp_path):
    made, _ = table()
    named = made.cast_column("label", datasets.Value("int64")).rename_columns({"image": "photo", "label": "number"})
    named = named.add_column("animal", ["zebra", "ape"] * 3)
    named.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(PassloraError, match="give --label_column, one of number, animal"):
        load(tmp_path)
    data = load(tmp_path, label_column="animal")
    assert data.class_names == ["ape", "zebra"] and data.train.labels[0] == 1
    assert load(tmp_path, label_column="number").class_names == ["0", "1"]
    with pytest.raises(PassloraError, match="did you mean 'animal'"):
        load(tmp_path, label_column="animals")


def test_files_of_another_split_stay_out_of_training(tmp_path):
    made, _ = table()
    for name in ("train", "validation", "test"):
        made.to_parquet(tmp_path / f"{name}-0.parquet")
    data = load(tmp_path, dataset_test_split="validation")
    assert (len(data.train), len(data.test)) == (6, 6)


@pytest.mark.parametrize("bad", [-1, 2, None])
def test_a_test_split_with_labels_of_its_own_is_refused(tmp_path, bad):
    made, images = table()
    made = made.cast_column("label", datasets.Value("int64"))
    made.to_parquet(tmp_path / "train.parquet")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": images[:2], "label": [0, bad]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(PassloraError, match=f"split 'test' has the label {bad} in row 1"):
        load(tmp_path)


def test_columns_of_the_wrong_kind(tmp_path):
    made, _ = table()
    made.add_column("weight", [0.5] * 6).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(PassloraError, match="not class names or whole numbers"):
        load(tmp_path, label_column="weight")
    with pytest.raises(PassloraError, match="does not hold images"):
        load(tmp_path, image_column="weight")


def test_a_misspelt_split_of_a_folder(image_tree):
    root = image_tree()
    with pytest.raises(PassloraError, match=r"no folder 'trian' to train on; it has train, test"):
        load(root, dataset_train_split="trian")
    with pytest.raises(PassloraError, match="no folder 'train'"):
        load(root / "train", dataset_test_split="test")


def test_limits_a_class():
    data = load("digits", max_train_per_class=7, max_test_per_class=3)
    assert np.bincount(data.train.labels).tolist() == [7] * 10
    assert np.bincount(data.test.labels).tolist() == [3] * 10
    rows = lambda seed: load("digits", seed, max_train_per_class=7).train.rows.chosen.tolist()
    assert rows(0) == rows(0) != rows(1)


def test_a_corrupt_file_is_named(image_tree):
    root = image_tree()
    bad = root / "train" / "dog" / "2.png"
    bad.write_bytes(bad.read_bytes()[:50])
    data = load(root)
    with pytest.raises(PassloraError, match=r"dog/2\.png \(row 6\)"):
        data.train.rgb(6)


def test_a_corrupt_row_is_named(tmp_path):
    made, _ = table()
    raw = made.cast_column("image", datasets.Image(decode=False))
    cells = [dict(cell) for cell in raw["image"]]
    cells[4] = {"bytes": b"broken", "path": "bee_4.png"}
    cells[5] = None
    features = datasets.Features({"image": datasets.Image(), "label": made.features["label"]})
    datasets.Dataset.from_dict({"image": cells, "label": made["label"][:]}, features=features).to_parquet(
        tmp_path / "train.parquet"
    )
    data = load(tmp_path, test_fraction=0.01)
    order = data.train.rows.chosen.tolist()
    for row, says in ((4, r"row 4 of .*bee_4\.png"), (5, r"row 5 of .*the cell is empty")):
        if row in order:
            with pytest.raises(PassloraError, match=says):
                data.train.rgb(order.index(row))
    assert set(order) & {4, 5}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./nowhere", "does not exist"),
        ("nowhere/at_all", "could not be loaded from the Hub"),
        ("missing.parquet", "does not exist"),
    ],
)
def test_a_dataset_that_is_not_there(name, says):
    with pytest.raises(PassloraError, match=says):
        load(name)


def test_folders_that_do_not_fit(tmp_path, image_tree):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PassloraError, match="no images in"):
        load(tmp_path / "empty")
    root = image_tree()
    (root / "test" / "owls").mkdir()
    (root / "test" / "owls" / "a.png").write_bytes((root / "test" / "owl" / "0.png").read_bytes())
    with pytest.raises(PassloraError, match="did you mean 'owl'"):
        load(root)
    with pytest.raises(PassloraError, match=r"no folder .*eval"):
        load(root, dataset_test_split="eval")


def test_a_split_that_is_not_there(tmp_path):
    made, _ = table()
    made.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(PassloraError, match="no split 'test'"):
        load(tmp_path, dataset_test_split="test")


# --- class names -----------------------------------------------------------------------------------------------

BAD_NAMES = [
    ("", "'' is empty"),
    (" \u3000", r"' \\u3000' is empty"),
    ("a\nb", r"'a\\nb' holds a line end or a control"),
    ("a\u2028b", "line end"),
    ("\x1b[31m", "control character"),
    ("caf\udce9", r"'caf\\udce9' is not UTF-8: rename"),
    ("x" * 1001, r"'x{77}\.\.\.' has 1,001 characters, at most 1,000"),
]


@pytest.mark.parametrize(("name", "says"), BAD_NAMES)
def test_names_that_no_class_may_have(name, says):
    with pytest.raises(PassloraError, match=says) as caught:
        check_class_name(name)
    assert str(caught.value).isascii(), "it can be shown anywhere"


@pytest.mark.parametrize("name", ["0", "crane", "Zürich, alt", "猫", "👩‍🔬", "a/b", "x" * 1000, "-"])
def test_names_that_a_class_may_have(name):
    check_class_name(name)


@pytest.mark.parametrize(("name", "says"), [pair for pair in BAD_NAMES if "\udce9" not in pair[0]])
def test_a_table_with_such_a_name(tmp_path, name, says):
    made, _ = table()
    text = made.remove_columns("label").add_column("label", ["ant", "bee", "ant", name, "bee", name])
    text.to_parquet(tmp_path / "train.parquet")
    with pytest.raises(PassloraError, match=f"column 'label', row 3: .*{says}"):
        load(tmp_path)
    (tmp_path / "labels").mkdir()
    table(classes=("ant", name))[0].to_parquet(tmp_path / "labels" / "train.parquet")
    with pytest.raises(PassloraError, match=f"labels: the class name .*{says}"):
        load(tmp_path / "labels")


def test_an_empty_name_in_the_test_split_only(tmp_path):
    made, _ = table()
    for split, names in (("train", ["ant", "bee"] * 3), ("test", ["ant", "bee", "ant", "ant", "", "bee"])):
        made.remove_columns("label").add_column("label", names).to_parquet(tmp_path / f"{split}.parquet")
    with pytest.raises(PassloraError, match="split 'test' has the label '' in row 4"):
        load(tmp_path)


@pytest.mark.parametrize("name", [" ", "a\nb", "\x07"])
def test_a_folder_with_such_a_name(image_tree, name):
    with pytest.raises(PassloraError, match="photos: the class name"):
        load(image_tree(classes=("cat", name)))


def test_a_label_names_one_class_in_all_kinds_of_tables(tmp_path):
    """`datasets` refuses two labels of one name, wherever it finds them: that must stay one sentence."""
    made, _ = table(classes=("crane", "crane2"))
    made.to_parquet(tmp_path / "x.parquet")
    raw = pyarrow.parquet.read_table(tmp_path / "x.parquet")
    twice = {key: value.replace(b"crane2", b"crane") for key, value in raw.schema.metadata.items()}
    pyarrow.parquet.write_table(raw.replace_schema_metadata(twice), tmp_path / "train.parquet")
    datasets.DatasetDict(train=made).save_to_disk(tmp_path / "saved")
    info = tmp_path / "saved" / "train" / "dataset_info.json"
    info.write_text(info.read_text().replace("crane2", "crane"))
    for path in ("train.parquet", "saved"):
        with pytest.raises(PassloraError, match=f"{path} cannot be read: Some label names are duplicated"):
            load(tmp_path / path)


def test_nothing_is_learnt_from_a_folder_whose_name_is_not_utf_8(image_tree, tmp_path, cli, monkeypatch):
    root = image_tree(splits=(), classes=("cat", "dog"))
    try:
        os.rename(root / "dog", os.fsencode(root) + b"/caf\xe9")
    except OSError:
        pytest.skip("this file system takes UTF-8 only")
    monkeypatch.setattr("passlora.training.learner.Learner.learn", lambda *_, **__: pytest.fail("trained"))
    code, _, err = cli("learn", tmp_path / "model", "--data", root)
    assert code == 2 and r"the class name 'caf\udce9' is not UTF-8: rename the class" in err
    assert not (tmp_path / "model" / "passlora.json").exists()
