from aevb.cli import main

main()
