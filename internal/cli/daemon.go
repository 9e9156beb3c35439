package cli

import (
	"cmp"
	"os"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/local"
)

// agentSocket is the flag of a command that asks this node's agent.
type agentSocket struct{ path string }

func (s *agentSocket) bind(c *cobra.Command) {
	c.Flags().StringVar(&s.path, "agent-socket",
		cmp.Or(os.Getenv("PILASTER_AGENT_SOCKET"), "/run/pilaster/agent.sock"),
		"unix socket of the agent (PILASTER_AGENT_SOCKET)")
}

func (s *agentSocket) client() pilasterv1connect.AgentServiceClient {
	return pilasterv1connect.NewAgentServiceClient(local.Client(s.path), local.URL, connect.WithGRPC())
}

// orchestratorSocket is the flag of a command that asks the orchestrator on this machine.
type orchestratorSocket struct{ path string }

func (s *orchestratorSocket) bind(c *cobra.Command) {
	c.Flags().StringVar(&s.path, "orchestrator-socket",
		cmp.Or(os.Getenv("PILASTER_ORCHESTRATOR_SOCKET"), "/run/pilaster/orchestrator.sock"),
		"unix socket of the orchestrator (PILASTER_ORCHESTRATOR_SOCKET)")
}

func (s *orchestratorSocket) client() pilasterv1connect.OperatorServiceClient {
	return pilasterv1connect.NewOperatorServiceClient(local.Client(s.path), local.URL, connect.WithGRPC())
}
