"""The roles in worker processes: actor, critic, reference, rollout, reward, advantage, teacher."""
