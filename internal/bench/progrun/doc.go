// Package progrun runs the programs of a node by themselves over packets as data (BPF_PROG_TEST_RUN), on tables that
// are filled as an agent fills them, and takes their times.
package progrun
