// Package progrun runs the programs of a node in isolation, over packets as data (BPF_PROG_TEST_RUN) and tables that
// are filled as by an agent, and measures their run time.
package progrun
