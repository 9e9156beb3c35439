package cli

import (
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/orchestrator/store"
)

// backupView is a backup as JSON.
type backupView struct {
	File     string    `json:"file"`
	Cluster  string    `json:"cluster"`
	Made     time.Time `json:"made"`
	Revision int64     `json:"revision"`
	Records  int       `json:"records"`
	DataDir  string    `json:"dataDir"`
	Skip     *uint64   `json:"skip,omitempty"` // Skip, Regions, Edge and Ruled are only set by restore
	Regions  []string  `json:"regions,omitempty"`
	Edge     string    `json:"edge,omitempty"`     // node that the backup records as the Edge Switch
	Ruled    []string  `json:"policies,omitempty"` // tenants with policies
}

func viewBackup(file, dataDir string, h store.BackupHeader) backupView {
	return backupView{
		File:     file,
		Cluster:  h.Cluster,
		Made:     h.Made,
		Revision: h.Revision,
		Records:  h.Records,
		DataDir:  dataDir,
	}
}

func newOrchestratorBackup(env Env) *cobra.Command {
	var dataDir string
	var out output
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Back up the embedded etcd to a file",
		Long: `Write a snapshot of the embedded etcd to a new file. The orchestrator may run or be stopped.

The file contains the keys of all tenants, the key of the cluster's certificate authority and the join
token. Only its owner may read it; store it as securely as those secrets. To back up an etcd cluster of
your own, use "etcdctl snapshot save".`,
		Example: "  pilaster orchestrator backup /backup/pilaster-$(date +%F).backup",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			header, err := store.Backup(cmd.Context(), dataDir, args[0], slog.New(slog.NewTextHandler(env.Stderr, nil)))
			if err != nil {
				return err
			}
			v := viewBackup(args[0], dataDir, header)
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(
					w,
					"%s has %d records of cluster %s at revision %d\n",
					v.File,
					v.Records,
					v.Cluster,
					v.Revision,
				)
				fmt.Fprintln(w, "It contains the keys of all tenants, the key of the certificate authority and the "+
					"join token: keep it secret.")
			})
		},
	}
	folder(cmd, &dataDir, "data-dir", "PILASTER_DATA_DIR", defaultDataDir, "orchestrator")
	out.bind(cmd)
	embeddedOnly(cmd, "back it up with `etcdctl snapshot save`")
	return cmd
}

func newOrchestratorRestore(env Env) *cobra.Command {
	var dataDir string
	var skip uint64
	var out output
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Create an orchestrator's data directory from a backup",
		Long: `Create an orchestrator's data directory from a backup, with the identity of the cluster. Nodes keep
their certificates and the join token.

The backup does not contain what was allocated after it was made. To avoid allocating those numbers
twice, the restored cluster skips the next --skip node prefixes, the next --skip tenant ids, and the
next --skip apps of each tenant. A node that already has one of them reports it when it registers.
Choose a greater number if more may have been allocated since the backup, including allocations of
another cluster that was restored from the same file.`,
		Example: "  pilaster orchestrator restore /backup/pilaster-2026-11-21.backup --data-dir " + defaultDataDir +
			"\n  pilaster orchestrator restore /backup/pilaster-2026-11-21.backup --data-dir " + defaultDataDir +
			" --skip 5000",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			is, err := store.Restore(
				cmd.Context(),
				args[0],
				dataDir,
				skip,
				slog.New(slog.NewTextHandler(env.Stderr, nil)),
			)
			if err != nil {
				return err
			}
			v := viewBackup(args[0], dataDir, is.BackupHeader)
			v.Skip, v.Regions, v.Edge, v.Ruled = &skip, is.Regions, is.Edge, is.WithPolicies
			return out.print(env.Stdout, v, func(w io.Writer) {
				fmt.Fprintf(
					w,
					"cluster %s restored to %s from the backup of %s: %d records\n",
					v.Cluster,
					v.DataDir,
					moment(v.Made),
					v.Records,
				)
				fmt.Fprintf(
					w,
					"The next %d node prefixes, tenant ids, and apps of each tenant are skipped, because nodes may "+
						"have them already; a node that has one reports it when it registers.\n",
					skip,
				)
				if len(v.Regions) > 0 {
					fmt.Fprintf(
						w,
						"Connected regions are those of the backup (%s): run `pilaster region delete` for regions "+
							"that were deleted later.\n",
						strings.Join(v.Regions, ", "),
					)
				}
				if len(v.Ruled) > 0 {
					fmt.Fprintf(
						w,
						"Policies are those of the backup (tenants %s): repeat later changes with `pilaster policy "+
							"apply` and `pilaster policy delete`.\n",
						strings.Join(v.Ruled, ", "),
					)
				}
				if v.Edge != "" {
					fmt.Fprintf(
						w,
						"Node %s is the Edge Switch: if another node replaced it after the backup, the orchestrator "+
							"refuses that node until you run `pilaster node delete %s --force`.\n",
						v.Edge,
						v.Edge,
					)
				}
			})
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", "", "the data directory to create: must be empty or not exist")
	cmd.Flags().
		Uint64Var(&skip, "skip", store.DefaultSkip, "how many numbers of each kind to skip, at least as many as were "+
			"allocated since the backup")
	_ = cmd.MarkFlagRequired("data-dir")
	out.bind(cmd)
	embeddedOnly(cmd, "restore it with `etcdutl snapshot restore`")
	return cmd
}

// embeddedOnly adds the orchestrator's --etcd as a hidden flag. If the user sets it, the command fails with an error
// that says what to do instead.
func embeddedOnly(cmd *cobra.Command, instead string) {
	var etcd string
	cmd.Flags().StringVar(&etcd, "etcd", "", "")
	_ = cmd.Flags().MarkHidden("etcd")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if etcd != "" {
			return usage(
				"this command is for the embedded etcd, but %s is an external one: %s\n  nothing was changed",
				etcd,
				instead,
			)
		}
		return nil
	}
}
