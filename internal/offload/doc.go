// Package offload decides.
package offload
