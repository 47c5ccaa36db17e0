# SPDX-License-Identifier: Apache-2.0
"""pario for Spack 1.0 and later.

    spack repo add packaging/spack/spack_repo/pario
    spack env create training && spack env activate training
    spack develop --no-clone --path $PWD py-pario@=0.2.0      # this clone; not needed once a release is on PyPI
    spack add py-pario +cli ^[virtuals=mpi] cray-mpich        # or any other MPI: mpich, openmpi, mvapich, ...
    spack install

tests/test_packaging.py compares the dependencies with pyproject.toml.
"""

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyPario(PythonPackage):
    """Collective MPI readers that feed training loops from one LMDB on shared storage."""

    pypi = "pario/pario-0.2.0.tar.gz"

    license("Apache-2.0")

    # The release adds the checksum of its sdist: `spack checksum --add-to-package py-pario`.
    version("0.2.0")

    variant("cli", default=True, description="python -m pario: doctor, info, verify, bench, pack, ...")
    variant("image", default=False, description="Decoders of JPEG and other images")
    variant("msgpack", default=False, description="The decoder of MessagePack")
    variant("zstd", default=False, description="Zstandard: values, and packed databases")
    variant("codecs", default=False, description="All codecs of packed databases")
    variant("fsspec", default=False, description="pario:// for everything that opens files by fsspec")
    variant("demo", default=False, description="python -m pario demo")
    variant("figures", default=False, description="The figures of benchmarks/, in a clone")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    # It brings the MPI library of the site.
    depends_on("py-mpi4py@4.0:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-numba@0.60:", type=("build", "run"))
    # pario opens HDF5 files from one process at a time; parallel HDF5 does no harm.
    depends_on("py-h5py@3.10:", type=("build", "run"))
    depends_on("py-lmdb@1.3:", type=("build", "run"))
    depends_on("py-xxhash@3.2:", type=("build", "run"))

    with when("+cli"):
        depends_on("py-click@8.1:", type=("build", "run"))
        depends_on("py-tqdm@4.66:", type=("build", "run"))
        depends_on("py-tomli@2.0:", type=("build", "run"), when="^python@:3.10")
    with when("+image"):
        # There is no package of simplejpeg: OpenCV decodes JPEG, too, more slowly.
        depends_on("opencv@4.8:+python3+imgcodecs+imgproc", type=("build", "run"))
    with when("+msgpack"):
        depends_on("py-msgpack@1.0:", type=("build", "run"))
    with when("+zstd"):
        depends_on("py-zstandard@0.25:", type=("build", "run"))
    with when("+codecs"):
        # There is no package of deflate: Python's zlib does its work, more slowly.
        depends_on("py-zstandard@0.25:", type=("build", "run"))
        depends_on("py-lz4@4.3:", type=("build", "run"))
        depends_on("py-brotli@1.1:", type=("build", "run"))
        depends_on("py-blosc2@2.5:", type=("build", "run"))
    with when("+fsspec"):
        depends_on("py-fsspec@2024.2:", type=("build", "run"))
    with when("+demo"):
        depends_on("py-scikit-learn@1.3:", type=("build", "run"))
    with when("+figures"):
        depends_on("py-matplotlib@3.7:", type=("build", "run"))

    # Both are commands.
    requires("+cli", when="+demo")
    requires("+cli", when="+figures")

    # The others need what the variants bring, or a framework that the user chooses.
    import_modules = ["pario", "pario.decode", "pario.lmdb"]
