package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/unixrpc"
)

// daemonSocket is the flag for the socket of a daemon on this machine.
type daemonSocket struct {
	path    string
	command *cobra.Command
}

func (s *daemonSocket) bind(c *cobra.Command, flag, variable, path, whose string) {
	s.command = c
	c.Flags().StringVar(&s.path, flag, cmp.Or(os.Getenv(variable), path), "unix socket of the "+whose+" ("+variable+")")
}

// agentSocket is the socket of this node's agent.
type agentSocket struct{ daemonSocket }

func (s *agentSocket) bind(c *cobra.Command) {
	s.daemonSocket.bind(c, "agent-socket", "PILASTER_AGENT_SOCKET", "/run/pilaster/agent.sock", "agent")
}

func (s *agentSocket) client() pilasterv1connect.AgentServiceClient {
	return pilasterv1connect.NewAgentServiceClient(unixrpc.Client(s.path), unixrpc.URL, connect.WithGRPC(), s.bounded())
}

// orchestratorSocket is the socket of the orchestrator on this machine.
type orchestratorSocket struct{ daemonSocket }

func (s *orchestratorSocket) bind(c *cobra.Command) {
	s.daemonSocket.bind(
		c,
		"orchestrator-socket",
		"PILASTER_ORCHESTRATOR_SOCKET",
		"/run/pilaster/orchestrator.sock",
		"orchestrator",
	)
}

func (s *orchestratorSocket) client() pilasterv1connect.OperatorServiceClient {
	return pilasterv1connect.NewOperatorServiceClient(
		unixrpc.Client(s.path),
		unixrpc.URL,
		connect.WithGRPC(),
		s.bounded(),
	)
}

// get reads a status that the orchestrator has as JSON.
func (s *orchestratorSocket) get(ctx context.Context, path string, to any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, unixrpc.URL+path, nil)
	if err != nil {
		return err
	}
	resp, err := unixrpc.Client(s.path).Do(req)
	if err != nil {
		return connect.NewError(connect.CodeUnavailable, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s", cmp.Or(strings.TrimSpace(string(text)), resp.Status))
	}
	if err := json.Unmarshal(text, to); err != nil {
		return fmt.Errorf("the orchestrator's answer is not readable: %w", err)
	}
	return nil
}

// newOrchestratorStatus returns the command "status" for a status that the orchestrator has as JSON.
func newOrchestratorStatus[S any](
	env Env, path string, show func(io.Writer, S, time.Time), c cobra.Command,
) *cobra.Command {
	var socket orchestratorSocket
	var out output
	c.Use, c.Args = "status", cobra.NoArgs
	c.RunE = func(c *cobra.Command, _ []string) error {
		var s S
		if err := socket.get(c.Context(), path, &s); err != nil {
			return err
		}
		return out.print(env.Stdout, s, func(w io.Writer) { show(w, s, time.Now()) })
	}
	socket.bind(&c)
	out.bind(&c)
	return &c
}

// names completes the only argument of a command with names from a daemon. If the daemon does not respond, it offers no
// names.
func names(ask func(context.Context) ([]string, error)) cobra.CompletionFunc {
	return func(c *cobra.Command, args []string, _ string) (all []string, _ cobra.ShellCompDirective) {
		if len(args) == 0 {
			ctx, cancel := context.WithTimeout(c.Context(), 3*time.Second) // a user waits at a terminal
			defer cancel()
			all, _ = ask(ctx)
		}
		return all, cobra.ShellCompDirectiveNoFileComp
	}
}

func (s *orchestratorSocket) tenants(ctx context.Context) (all []string, err error) {
	resp, err := s.client().ListTenants(ctx, connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
	if err == nil {
		for _, t := range resp.Msg.Tenants {
			all = append(all, t.Name)
		}
	}
	return all, err
}

func (s *orchestratorSocket) nodes(ctx context.Context) (all []string, err error) {
	resp, err := s.client().ListNodes(ctx, connect.NewRequest(&pilasterv1.ListNodesRequest{}))
	if err == nil {
		for _, n := range resp.Msg.Nodes {
			all = append(all, n.Name)
		}
	}
	return all, err
}

func (s *orchestratorSocket) regions(ctx context.Context) (all []string, err error) {
	resp, err := s.client().ListRegions(ctx, connect.NewRequest(&pilasterv1.ListRegionsRequest{}))
	if err == nil {
		for _, r := range resp.Msg.Regions {
			all = append(all, r.Name)
		}
	}
	return all, err
}

func (s *orchestratorSocket) underlayServices(ctx context.Context, tenant string) (all []string, err error) {
	resp, err := s.client().
		ListUnderlayServices(ctx, connect.NewRequest(&pilasterv1.ListUnderlayServicesRequest{Tenant: tenant}))
	if err == nil {
		for _, is := range resp.Msg.UnderlayServices {
			all = append(all, is.Name)
		}
	}
	return all, err
}

func (s *orchestratorSocket) publications(ctx context.Context, tenant string) (all []string, err error) {
	resp, err := s.client().
		ListPublications(ctx, connect.NewRequest(&pilasterv1.ListPublicationsRequest{Tenant: tenant}))
	if err == nil {
		for _, p := range resp.Msg.Publications {
			all = append(all, p.Name)
		}
	}
	return all, err
}

func (s *orchestratorSocket) policies(ctx context.Context, tenant string) (all []string, err error) {
	resp, err := s.client().ListPolicies(ctx, connect.NewRequest(&pilasterv1.ListPoliciesRequest{Tenant: tenant}))
	if err == nil {
		for _, p := range resp.Msg.Policies {
			all = append(all, store.PolicyName(p))
		}
	}
	return all, err
}

func (s *agentSocket) endpoints(ctx context.Context) (all []string, err error) {
	resp, err := s.client().ListEndpoints(ctx, connect.NewRequest(&pilasterv1.ListEndpointsRequest{}))
	if err == nil {
		for _, e := range resp.Msg.Endpoints {
			all = append(all, viewEndpoint(e).name())
		}
	}
	return all, err
}

// whereTo returns advice for the case that the daemon of a command does not respond.
func whereTo(c *cobra.Command, silent error) string {
	for _, d := range []struct{ flag, whose string }{
		{"orchestrator-socket", "an orchestrator"}, {"agent-socket", "an agent"},
		{"accelerate-socket", "the accelerate daemon"}, {"socket", "the accelerate daemon"},
	} {
		if flag := c.Flag(d.flag); flag != nil && strings.Contains(silent.Error(), flag.Value.String()) {
			return fmt.Sprintf(
				"  run this command where %s runs; if it should run here, start it, or set its socket with --%s\n",
				d.whose,
				flag.Name,
			)
		}
	}
	return ""
}

// folder adds the flag for a folder of a daemon on this machine. Labs set the environment variable to their own
// folders.
func folder(c *cobra.Command, into *string, flag, variable, path, whose string) {
	c.Flags().StringVar(into, flag, cmp.Or(os.Getenv(variable), path), "the "+whose+"'s --"+flag+" ("+variable+")")
}

func agentState(c *cobra.Command, into *string) {
	folder(c, into, "state-dir", "PILASTER_STATE_DIR", "/var/lib/pilaster", "agent")
}

func agentPins(c *cobra.Command, into *string) {
	folder(c, into, "bpffs", "PILASTER_BPFFS", "/sys/fs/bpf/pilaster", "agent")
}

const timeoutFlag = "timeout"

// patience is the --timeout of all commands. It must be more than 0.
type patience time.Duration

func (p *patience) String() string { return time.Duration(*p).String() }
func (p *patience) Type() string   { return "duration" }
func (p *patience) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return errors.New("use a duration such as 10s or 1m")
	}
	*p = patience(d)
	return nil
}

// atMost is the maximum time for which a command waits for nodes. With 0, the command checks once.
type atMost time.Duration

func (a *atMost) String() string { return time.Duration(*a).String() }
func (a *atMost) Type() string   { return "duration" }
func (a *atMost) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return errors.New("use a duration such as 10s or 1m")
	}
	*a = atMost(d)
	return nil
}

// bounded sets the deadline of unary calls. Streams have no deadline.
func (s *daemonSocket) bounded() connect.Option {
	return connect.WithInterceptors(connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
			limit := time.Duration(*s.command.Flag(timeoutFlag).Value.(*patience))
			call, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			resp, err := next(call, req)
			// The daemon has the same deadline, and may return the error first.
			if err != nil && ctx.Err() == nil &&
				(call.Err() != nil || connect.CodeOf(err) == connect.CodeDeadlineExceeded) {
				err = &exitError{
					ExitUnreachable,
					fmt.Errorf(
						"no answer on %s within %v; the daemon hangs, or is busy and may still complete the "+
							"request: look at its log, retry, or increase --%s",
						s.path,
						limit,
						timeoutFlag,
					),
				}
			}
			return resp, err
		}
	}))
}
