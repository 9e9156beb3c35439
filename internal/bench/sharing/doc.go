// Package sharing measures what load sharing between nodes costs and gains (Nezha, SIGCOMM 2025; claims NZ9, NZ10): the
// time of each program for a TCP transaction with and without a frontend, by rule sets. From these times it computes
// the gain of several frontends, which is a model: all nodes are namespaces of one machine, and share its CPUs.
package sharing
