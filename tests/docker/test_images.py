"""What the images are made of."""

import json


def inspect(engine, image):
    return json.loads(engine.docker("image", "inspect", image).stdout)[0]["Config"]


def test_images_say_what_they_are_and_run_as_nobody_special(engine, images):
    for image in images:
        config = inspect(engine, image)
        assert config["User"] == "1000:1000", image
        assert config["Labels"]["org.opencontainers.image.title"] == "swathe", image
        assert config["Labels"]["org.opencontainers.image.version"] == "0.1.0", image
        assert "PYTHONSAFEPATH=1" in config["Env"], image
        assert not any("PASSWORD" in entry or "KEY" in entry for entry in config["Env"]), image


def test_the_producer_has_no_torch_and_the_worker_has(engine, images):
    probe = "import importlib.util as u; print(*(n for n in ('torch', 'fla', 'redis') if u.find_spec(n)))"
    said = {
        image: engine.docker("run", "--rm", image, "python3", "-c", probe).stdout.split()
        for image in images
    }
    assert said["swathe-producer:0.1.0"] == ["redis"]
    assert said["swathe-worker:0.1.0"] == ["torch", "fla", "redis"]


def test_the_worker_can_compile_what_triton_needs(engine, images):
    assert "gcc" in engine.docker("run", "--rm", images[1], "gcc", "--version").stdout


def test_no_pip_and_no_package_settings_are_left(engine, images):
    for image in images:
        done = engine.docker("run", "--rm", image, "sh", "-c", "ls /opt/swathe/bin/pip* /tools/*", check=False)  # fmt: skip
        assert done.stdout == "", image


def test_the_secrets_refuse_a_password_that_would_break_a_url(engine, images):
    run = ["run", "--rm", "--tmpfs", "/secrets:mode=1777", "-e"]
    done = engine.docker(*run, "REDIS_PASSWORD=a/b", images[0], "make-secrets", check=False)
    assert done.returncode == 2
    assert "letters, digits" in done.stderr
    assert engine.docker(*run, "REDIS_PASSWORD=a-b", images[0], "make-secrets").returncode == 0
