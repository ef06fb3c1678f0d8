from lamella.cli import main

main()
