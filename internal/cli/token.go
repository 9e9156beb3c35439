package cli

import (
	"fmt"
	"io"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// tokenView is the join token as JSON.
type tokenView struct {
	Token string `json:"token"`
}

func (v tokenView) text(w io.Writer) { fmt.Fprintln(w, v.Token) }

func newOrchestratorToken(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "token",
		Short:   "Show and rotate the token that nodes join with",
		Example: "  pilaster orchestrator token show\n  pilaster orchestrator token rotate",
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(newTokenShow(env), newTokenRotate(env))
	return cmd
}

func newTokenShow(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:     "show",
		Short:   "Show the join token, with which any machine can join as a new node",
		Example: "  pilaster orchestrator token show > join-token",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().GetToken(cmd.Context(), connect.NewRequest(&pilasterv1.GetTokenRequest{}))
			if err != nil {
				return err
			}
			v := tokenView{resp.Msg.Token}
			return out.print(env.Stdout, v, v.text)
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	return cmd
}

func newTokenRotate(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Create a new join token and show it; the old one is refused at once",
		Long: `Create a new join token and show it. When the command returns, no orchestrator of the cluster accepts
the old token, and the file join-token contains the new one. Other orchestrators update their file
within moments.

Nodes that have joined need no token and are not affected. A node that joined with a leaked token stays
a node until you run 'pilaster node delete'.`,
		Example: "  pilaster orchestrator token rotate\n  pilaster orchestrator token rotate -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().
				RotateToken(cmd.Context(), connect.NewRequest(&pilasterv1.RotateTokenRequest{}))
			if err != nil {
				return err
			}
			v := tokenView{resp.Msg.Token}
			return out.print(env.Stdout, v, v.text)
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	return cmd
}
