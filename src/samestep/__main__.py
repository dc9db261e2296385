from samestep.cli import main

main()
