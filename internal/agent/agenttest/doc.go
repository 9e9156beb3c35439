// Package agenttest has what tests of several packages of the agent share: a core between a fake data path and a fake
// orchestrator. Only tests import it.
package agenttest
