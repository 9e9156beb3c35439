package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/sysdump"
)

// sysdumpView is the result of a collection as JSON.
type sysdumpView struct {
	File   string           `json:"file"`
	Bytes  int64            `json:"bytes"`
	Parts  []sysdump.Result `json:"parts"`
	Failed int              `json:"failed"` // incomplete parts
}

func newSysdumpCommand(env Env) *cobra.Command {
	var config sysdump.Config
	var agent agentSocket
	var orchestrator orchestratorSocket
	var out output
	c := &cobra.Command{
		Use:   "sysdump [FILE.tar.gz]",
		Short: "Collect a diagnostic archive of this node",
		Long: `Collect a diagnostic archive of this node: versions, status, endpoints, tables, counters and recent
drops, eBPF programs and their chains, links, routes, rules, neighbours and sysctls, preflight checks,
log, metrics and goroutines of the agent, and the orchestrator's view if its socket is on this machine.
The command also works if all daemons are stopped: the output and index.json name each part that could
not be collected, with its error.

The archive contains no keys and no tokens. It contains addresses, names of tenants, pods and nodes,
labels, and the unfiltered log of the agent: review it before you share it.`,
		Example: `  pilaster sysdump
  pilaster sysdump /tmp/n1.tar.gz --log /var/log/pilaster-agent.log`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			config.Version = buildVersion()
			config.AgentSocket, config.OrchestratorSocket = agent.path, orchestrator.path
			file := defaultDump(time.Now())
			if len(args) > 0 {
				file = args[0]
			}
			v, err := dump(c.Context(), env.Stderr, config, file)
			if err != nil {
				return err
			}
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(
					w,
					"%s: %s, %d of them incomplete, %s bytes\n",
					v.File,
					humanize.Of(len(v.Parts), "part", "parts"),
					v.Failed,
					humanize.Grouped(v.Bytes),
				)
			})
		},
	}
	agent.bind(c)
	orchestrator.bind(c)
	f := c.Flags()
	agentState(c, &config.StateDir)
	agentPins(c, &config.BPFFS)
	f.StringSliceVar(&config.Uplinks, "uplink", nil, "the agent's --uplink (default: the devices with its programs)")
	f.StringVar(&config.Log, "log", "", "file with the agent's log (default: the journal of pilaster-agent)")
	out.bind(c)
	return c
}

// defaultDump returns a file name for the working directory, with the host name and the time.
func defaultDump(now time.Time) string {
	host, err := os.Hostname()
	if err != nil {
		host = "node"
	}
	return fmt.Sprintf("pilaster-sysdump-%s-%s.tar.gz", host, now.UTC().Format("20060102T150405Z"))
}

// dump writes the archive, and removes the file if it fails.
func dump(ctx context.Context, progress io.Writer, config sysdump.Config, file string) (v sysdumpView, err error) {
	f, err := sysdump.Create(file)
	if err != nil {
		return v, err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			err = errors.Join(err, os.Remove(file))
		}
	}()
	v.File = file
	folder := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(file), ".gz"), ".tar")
	v.Parts, err = sysdump.Write(ctx, f, folder, sysdump.Parts(config), func(r sysdump.Result) {
		if r.Error != "" {
			v.Failed++
			fmt.Fprintf(progress, "%-28s %s\n", r.Part, strings.ReplaceAll(r.Error, "\n", "; "))
			return
		}
		fmt.Fprintf(progress, "%-28s ok\n", r.Part)
	})
	if err != nil {
		return v, err
	}
	info, err := f.Stat()
	if err == nil {
		v.Bytes = info.Size()
	}
	return v, err
}
