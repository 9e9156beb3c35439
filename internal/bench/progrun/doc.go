// Package progrun measures the run time of a node's programs in isolation: it runs them with BPF_PROG_TEST_RUN on given
// packets, with tables that are filled as by an agent.
package progrun
