package cli

import (
	"fmt"
	"io"
	"net/http"
	"os"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/unixrpc"
)

func newMetricsCommand(env Env) *cobra.Command {
	var agent agentSocket
	var orchestrator orchestratorSocket
	var accelerated accelerateSocket
	c := &cobra.Command{
		Use:   "metrics [agent | orchestrator | accelerate]",
		Short: "Print the metrics of a daemon on this machine",
		Long: `Print the metrics of this node's agent (the default), or of the orchestrator or the accelerate daemon on
this machine, in the text format of Prometheus. docs/reference/metrics.md explains them. The daemons
need no --metrics-listen for this command.`,
		Example:   "  pilaster metrics | grep pilaster_datapath_drops_total\n  pilaster metrics orchestrator",
		Args:      cobra.MatchAll(cobra.MaximumNArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"agent", "orchestrator", "accelerate"},
		RunE: func(c *cobra.Command, args []string) error {
			socket := agent.path
			if len(args) == 1 {
				socket = map[string]string{
					"agent": agent.path, "orchestrator": orchestrator.path, "accelerate": accelerated.path,
				}[args[0]]
			}
			req, err := http.NewRequestWithContext(c.Context(), http.MethodGet, unixrpc.URL+"/metrics", nil)
			if err != nil {
				return err
			}
			resp, err := unixrpc.Client(socket).Do(req)
			if _, missing := os.Stat(orchestrator.path); err != nil && missing == nil && len(args) == 0 {
				err = fmt.Errorf("%w; `pilaster metrics orchestrator` prints those of the orchestrator here", err)
			}
			if err != nil {
				return connect.NewError(connect.CodeUnavailable, err)
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return fmt.Errorf("%s returns no metrics: %s", socket, resp.Status)
			}
			_, err = io.Copy(env.Stdout, resp.Body)
			return err
		},
	}
	agent.bind(c)
	orchestrator.bind(c)
	accelerated.bind(c, "accelerate-socket")
	return c
}
